"""The host's PCIe tree, from sysfs: where devices are, and how far apart.

A device's path is the root complex, the root port, the ports of switches, and the device. Traffic
between two devices below one switch does not pass the CPU; with only the root complex in common it
does; with neither it crosses between root complexes or sockets.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from hetero.device.sysfs import entries, read_text

SYS = Path("/sys")

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT_COMPLEX = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


class Distance(IntEnum):
    """How far apart two PCIe devices are; a smaller number is nearer."""

    SAME_SWITCH = 0
    SAME_HOST_BRIDGE = 1
    SAME_NUMA_NODE = 2
    ACROSS_NUMA_NODES = 3
    UNKNOWN = 4

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ").replace("numa", "NUMA")


@dataclass(frozen=True)
class PciDevice:
    """A device on the PCIe tree."""

    address: str
    """Domain, bus, device and function, as in 0000:18:00.0."""
    path: tuple[str, ...]
    """Its ancestors from the root complex down, itself last."""
    numa_node: int | None
    """None where the platform does not say, as on a machine of one node."""


@dataclass(frozen=True)
class RdmaDevice:
    """An RDMA device and the network interfaces of its ports (none on InfiniBand without IPoIB)."""

    name: str
    pci: PciDevice | None
    interfaces: tuple[str, ...]


def pci_device(address: str, *, sys_root: Path = SYS) -> PciDevice | None:
    """The device at an address; None where there is none. The address may be in upper case."""
    return _pci_device_at(sys_root / "bus/pci/devices" / address.lower())


def parent_on_pci(entry: Path) -> PciDevice | None:
    """The PCIe device of a class entry; for a virtio device its parent."""
    return _pci_device_at(entry / "device")


def rdma_devices(*, sys_root: Path = SYS) -> list[RdmaDevice]:
    """Every RDMA device, in the order of their names."""
    folder = sys_root / "class/infiniband"
    return [
        RdmaDevice(name, parent_on_pci(folder / name), _interfaces_of(folder / name))
        for name in entries(folder)
    ]


def distance(one: PciDevice | None, other: PciDevice | None) -> Distance:
    """How far apart two devices are; UNKNOWN if either is not on the tree."""
    if one is None or other is None:
        return Distance.UNKNOWN
    shared = _shared_length(one, other)
    if shared >= 2:
        return Distance.SAME_SWITCH
    if shared == 1:
        return Distance.SAME_HOST_BRIDGE
    if one.numa_node is None or other.numa_node is None:
        return Distance.UNKNOWN
    if one.numa_node == other.numa_node:
        return Distance.SAME_NUMA_NODE
    return Distance.ACROSS_NUMA_NODES


def ports_between(one: PciDevice, other: PciDevice) -> tuple[str, ...]:
    """The bridges that traffic between two devices passes, below their common ancestor."""
    shared = _shared_length(one, other)
    return one.path[shared:-1] + other.path[shared:-1]


def closeness(one: PciDevice | None, other: PciDevice | None) -> tuple[int, int]:
    """A key to sort by: the distance, then the number of switch ports in between."""
    if one is None or other is None:
        return int(Distance.UNKNOWN), 0
    return int(distance(one, other)), len(ports_between(one, other))


def _shared_length(one: PciDevice, other: PciDevice) -> int:
    """The number of common ancestors."""
    shared = 0
    for ours, theirs in zip(one.path, other.path, strict=False):
        if ours != theirs:
            break
        shared += 1
    return shared


def _pci_device_at(link: Path) -> PciDevice | None:
    if not link.exists():
        return None
    parts = Path(os.path.realpath(link)).parts
    roots = [index for index, part in enumerate(parts) if _ROOT_COMPLEX.fullmatch(part)]
    if not roots:
        return None
    # Use the last root complex: a volume management device has one inside another's.
    path = (parts[roots[-1]], *(p for p in parts[roots[-1] :] if _ADDRESS.fullmatch(p)))
    if len(path) < 2:
        return None
    return PciDevice(address=path[-1], path=path, numa_node=_numa_node(link))


def _numa_node(device: Path) -> int | None:
    real = Path(os.path.realpath(device))
    text = read_text(real / "numa_node") or read_text(real.parent / "numa_node")
    return int(text) if text.isdecimal() else None


def _interfaces_of(device: Path) -> tuple[str, ...]:
    """A NIC's network interfaces; for software RDMA those of each port's first GID."""
    if beside := entries(device / "device/net"):
        return tuple(beside)
    ports = [device / "ports" / port for port in entries(device / "ports")]
    return tuple(sorted({*filter(None, (read_text(p / "gid_attrs/ndevs/0") for p in ports))}))
