"""Accelerator specifications: those built in (accelerators.yaml) and those of a cluster file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from hetero.errors import Faults, UserError
from hetero.plan import VENDORS
from hetero.yaml_file import missing_keys

_LINK_LATENCY_US = 10.0
"""Start-up latency of a transfer inside a node, the library's kernel launch included."""
MATMUL_PART = 794.5 / 989.4
"""Of its peak, what a matrix product reaches on H100: assumed of parts without `matmul_tflops`."""

FP8_PART = 0.76
"""Of a peak in fp8, what a product reaches of the part that one in bf16 reaches of its own. Fitted
to nine published runs of H100, which it meets within 14 % (docs/benchmarks/planner.md). Not
measured on another GPU."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The specification of one GPU (for MI250X: of one die). Bandwidths: bytes/s, one direction."""

    name: str
    vendor: str
    memory_gib: float
    flops: float
    """Peak dense bf16 FLOP/s."""
    memory_bandwidth: float
    link_bandwidth: float
    """To the other GPUs of the node, summed over all links."""
    link_latency: float
    """Start-up latency of a transfer inside the node, in seconds."""
    nic_bandwidth: float
    """One GPU's share of the node's NICs."""
    source: str
    """Reference for flops, memory and memory bandwidth."""
    link_source: str
    nic_source: str
    link_peers: int | None = None
    """GPUs that have a link of their own each; None where a switch joins all GPUs of the node."""
    measured_matmul_flops: float | None = None
    matmul_source: str = ""
    fp8_flops: float | None = None
    """Peak dense FLOP/s in 8-bit floating point; None where it does not multiply in fp8."""
    has_grouped_mm: bool = False
    """Whether torch's grouped_mm has a kernel; else it computes one expert after the other."""
    has_fp8_grouped_mm: bool = False
    """Whether torch's _scaled_grouped_mm has one; else experts stay in bf16."""

    @property
    def matmul_flops(self) -> float:
        """FLOP/s of the fastest bf16 matrix product: mostly power keeps it below the peak."""
        return self.measured_matmul_flops or self.flops * MATMUL_PART

    @property
    def fp8_matmul_flops(self) -> float:
        """The same in fp8; bf16's where it has no fp8."""
        if self.fp8_flops is None:
            return self.matmul_flops
        return self.matmul_flops * self.fp8_flops / self.flops * FP8_PART


_NUMBERS = ("memory", "tflops", "memory_bandwidth", "link", "nic")
_SOURCES = ("source", "matmul_source", "link_source", "nic_source")
_OPTIONAL = ("link_latency_us", "link_peers", "matmul_tflops", "fp8_tflops")
_GROUPED = ("grouped_mm", "fp8_grouped_mm")
_KEYS = frozenset({"vendor", *_GROUPED, *_NUMBERS, *_OPTIONAL, *_SOURCES})


def accelerator_from_mapping(name: str, data: object, *, where: str) -> Accelerator:
    """Parse one entry in the format of accelerators.yaml. `where` names the file in errors."""
    if not isinstance(data, Mapping):
        raise UserError(f"{where}: {name} must say {', '.join(('vendor', *_NUMBERS))}")
    label = f"{where}: the accelerator {name}"
    faults = Faults()
    faults.sentences += unknown_keys(data, _KEYS, where=label)
    if missing := missing_keys(data, ("vendor", *_NUMBERS), _KEYS):
        faults.sentences.append(f"{label} lacks {', '.join(missing)}")
    if data.get("vendor", VENDORS[0]) not in VENDORS:
        faults.sentences.append(
            f"{label} names the vendor {data['vendor']!r}; the vendors are {', '.join(VENDORS)}"
        )
    faults.sentences += [
        f"{label}: {key} is {data[key]!r}; it must be true or false"
        for key in _GROUPED
        if not isinstance(data.get(key, False), bool)
    ]
    if data.get("fp8_grouped_mm") is True and "fp8_tflops" not in data:
        faults.sentences.append(
            f"{label} has fp8_grouped_mm and no fp8_tflops; give the peak in fp8, or leave it out"
        )
    figures = {"link_latency_us": _LINK_LATENCY_US, **data}
    numbers = {
        key: faults.read(partial(figure, figures, key, where=label)) or 0.0
        for key in (*_NUMBERS, *_OPTIONAL)
        if key in figures
    }
    if numbers.get("link_peers", 1.0) % 1:
        faults.sentences.append(f"{label}: link_peers is {data['link_peers']!r}; GPUs are whole")
    if numbers.get("matmul_tflops", 0.0) > numbers.get("tflops", 0.0) > 0:
        faults.sentences.append(
            f"{label}: matmul_tflops {data['matmul_tflops']} is above its peak, tflops "
            f"{data['tflops']}"
        )
    faults.refuse()
    return Accelerator(
        name=name,
        vendor=data["vendor"],
        memory_gib=numbers["memory"],
        flops=numbers["tflops"] * 1e12,
        memory_bandwidth=numbers["memory_bandwidth"] * 1e9,
        link_bandwidth=numbers["link"] * 1e9,
        link_latency=numbers["link_latency_us"] * 1e-6,
        nic_bandwidth=numbers["nic"] * 1e9 / 8,
        link_peers=int(numbers["link_peers"]) if "link_peers" in data else None,
        measured_matmul_flops=numbers["matmul_tflops"] * 1e12 if "matmul_tflops" in data else None,
        fp8_flops=numbers["fp8_tflops"] * 1e12 if "fp8_tflops" in data else None,
        has_grouped_mm=data.get("grouped_mm", False),
        has_fp8_grouped_mm=data.get("fp8_grouped_mm", False),
        **{key: str(data.get(key, where)) for key in _SOURCES},
    )


_MOST = {
    "memory": (10_000, "GiB"),
    "tflops": (1_000_000, "1e12 operations a second"),
    "matmul_tflops": (1_000_000, "1e12 operations a second"),
    "fp8_tflops": (1_000_000, "1e12 operations a second"),
    "memory_bandwidth": (1_000_000, "1e9 bytes a second"),
    "link": (100_000, "1e9 bytes a second"),
    "nic": (100_000, "1e9 bits a second"),
    "link_latency_us": (1_000_000, "microseconds"),
    "rail_gbits": (100_000, "1e9 bits a second"),
    "rail_both_ways_gbits": (100_000, "1e9 bits a second"),
    "rail_latency_us": (10_000_000, "microseconds"),
}
"""Of each figure the most that any hardware has, with room: above it the unit is another one."""


def figure(entry: Mapping[Any, Any], key: str, *, where: str) -> float:
    """A number above 0 of a cluster file, in the unit that its key has."""
    value, (most, unit) = entry[key], _MOST.get(key, (math.inf, ""))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        plain = ", written plainly, as 400 or 1.5" if isinstance(value, str) else ""
        raise UserError(f"{where}: {key} is {value!r}; it must be a number above 0{plain}")
    if value > most:
        raise UserError(f"{where}: {key} is {value!r}, which no hardware has; give it in {unit}")
    return float(value)


def unknown_keys(entry: Mapping[Any, Any], keys: Set[str], *, where: str) -> list[str]:
    """One error sentence for each key of `entry` that is not in `keys`."""
    return [
        f"{where}: unknown key {key!r}; the keys are {', '.join(sorted(keys))}"
        for key in sorted(set(map(str, entry)) - keys)
    ]


@cache
def built_in_accelerators() -> Mapping[str, Accelerator]:
    """All accelerators of accelerators.yaml, by name."""
    file = Path(__file__).with_name("accelerators.yaml")
    entries = yaml.safe_load(file.read_text("utf-8"))
    return MappingProxyType(
        {
            name: accelerator_from_mapping(name, entry, where=file.name)
            for name, entry in entries.items()
        }
    )


def match_driver_name(driver: str) -> str | None:
    """The built-in accelerator whose name is the longest contained in the driver's device name."""

    def normalized(text: str) -> str:
        return "".join(letter for letter in text.lower() if letter.isalnum())

    return max(
        (name for name in built_in_accelerators() if normalized(name) in normalized(driver)),
        key=len,
        default=None,
    )
