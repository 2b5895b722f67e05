"""Accelerators by name: those of accelerators.yaml, and those that a cluster file describes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from hetero.errors import Faults, Refusal
from hetero.plan import VENDORS

_LATENCY = 10.0
"""Microseconds until a transfer inside a node has begun, the library's launch included."""


class ClusterError(Refusal):
    """The cluster makes no sense. Each sentence says what is wrong with which kind of node."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU (of the MI250X one of its two dies). Bandwidths are bytes a second, one direction."""

    name: str
    vendor: str
    memory_gib: float
    flops: float
    """Dense bf16 operations a second, at peak."""
    memory_bandwidth: float
    link_bandwidth: float
    """To the other GPUs of its node, all links together."""
    link_latency: float
    """Seconds until a transfer inside the node has begun."""
    nic_bandwidth: float
    """Its part of the node's NICs."""
    source: str
    """Where operations, memory and its bandwidth stand."""
    link_source: str
    nic_source: str


_NUMBERS = ("memory", "tflops", "memory_bandwidth", "link", "nic")
_SOURCES = ("source", "link_source", "nic_source")
_KEYS = frozenset({"vendor", "link_latency_us", *_NUMBERS, *_SOURCES})


def accelerator_from_mapping(name: str, data: object, *, where: str) -> Accelerator:
    """Read one entry of the form that accelerators.yaml has. `where` names the file in errors."""
    if not isinstance(data, Mapping):
        raise ClusterError(f"{where}: {name} must say {', '.join(('vendor', *_NUMBERS))}")
    called = f"{where}: the accelerator {name}"
    faults = Faults()
    faults.sentences += unknown_keys(data, _KEYS, where=called)
    if missing := [key for key in ("vendor", *_NUMBERS) if key not in data]:
        faults.sentences.append(f"{called} lacks {', '.join(missing)}")
    if data.get("vendor", VENDORS[0]) not in VENDORS:
        faults.sentences.append(
            f"{called} names the vendor {data['vendor']!r}; the vendors are {', '.join(VENDORS)}"
        )
    given = {"link_latency_us": _LATENCY, **data}
    numbers = {
        key: faults.read(partial(positive, given[key], where=f"{called}: {key}")) or 0.0
        for key in (*_NUMBERS, "link_latency_us")
        if key in given
    }
    faults.refuse(ClusterError)
    return Accelerator(
        name=name,
        vendor=data["vendor"],
        memory_gib=numbers["memory"],
        flops=numbers["tflops"] * 1e12,
        memory_bandwidth=numbers["memory_bandwidth"] * 1e9,
        link_bandwidth=numbers["link"] * 1e9,
        link_latency=numbers["link_latency_us"] * 1e-6,
        nic_bandwidth=numbers["nic"] * 1e9 / 8,
        **{key: str(data.get(key, where)) for key in _SOURCES},
    )


def positive(value: Any, *, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ClusterError(f"{where} is {value!r}; it must be a number above 0")
    return float(value)


def unknown_keys(entry: Mapping[Any, Any], keys: Set[str], *, where: str) -> list[str]:
    """A sentence for each."""
    return [
        f"{where}: unknown key {key!r}; the keys are {', '.join(sorted(keys))}"
        for key in sorted(set(map(str, entry)) - keys)
    ]


@cache
def built_in() -> Mapping[str, Accelerator]:
    """The accelerators that are known by name."""
    file = Path(__file__).with_name("accelerators.yaml")
    entries = yaml.safe_load(file.read_text("utf-8"))
    return MappingProxyType(
        {
            name: accelerator_from_mapping(name, entry, where=file.name)
            for name, entry in entries.items()
        }
    )


def built_in_named(driver: str) -> str | None:
    """The built-in accelerator that a driver means: the longest name in what it says."""

    def plain(text: str) -> str:
        return "".join(letter for letter in text.lower() if letter.isalnum())

    return max((name for name in built_in() if plain(name) in plain(driver)), key=len, default=None)
