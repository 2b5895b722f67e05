"""Accelerators by name: those of accelerators.yaml, and those that a cluster file describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from hetero.errors import UserError
from hetero.plan import VENDORS

_LATENCY = 10.0
"""Microseconds until a transfer inside a node has begun, the library's launch included."""


class ClusterError(UserError):
    """The cluster makes no sense. The text says what is wrong with which kind of node."""


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
    unknown = sorted(set(map(str, data)) - _KEYS)
    missing = [key for key in ("vendor", *_NUMBERS) if key not in data]
    if unknown or missing:
        what = f"has the unknown key {unknown[0]!r}" if unknown else f"lacks {', '.join(missing)}"
        raise ClusterError(f"{where}: the accelerator {name} {what}")
    if data["vendor"] not in VENDORS:
        raise ClusterError(
            f"{where}: the accelerator {name} names the vendor {data['vendor']!r}; the vendors "
            f"are {', '.join(VENDORS)}"
        )
    numbers = {
        key: positive(data.get(key, _LATENCY), where=f"{where}: {key} of the accelerator {name}")
        for key in (*_NUMBERS, "link_latency_us")
    }
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ClusterError(f"{where} is {value!r}; it must be a number above 0")
    return float(value)


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
