"""The network interfaces of a node."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hetero.device.sysfs import entries, read_integer, read_text
from hetero.device.topology import PciDevice, parent_on_pci
from hetero.tools.preflight_checks.roots import Roots

_LOOPBACK = 772
"""ARPHRD_LOOPBACK of Linux."""


@dataclass(frozen=True)
class InterfaceFacts:
    """One network interface."""

    name: str
    state: str
    speed: int | None
    """Megabits per second; None where the driver does not say or the link is down."""
    mtu: int | None
    addresses: tuple[str, ...]
    """IPv4 first."""
    pci: PciDevice | None
    kind: str
    """physical where a device carries it, loopback, bridge, or virtual: bonds, VLANs, tunnels."""

    @property
    def is_up(self) -> bool:
        return self.state == "up"

    @property
    def address(self) -> str | None:
        return next(iter(self.addresses), None)


def live_addresses() -> dict[str, list[str]]:
    """The IP addresses of every interface, IPv4 before IPv6, without link-local IPv6 ones."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [
            entry.address
            for family in families
            for entry in addresses
            if entry.family == family and not entry.address.startswith("fe80")
        ]
        for name, addresses in psutil.net_if_addrs().items()
    }


def read_interfaces(
    roots: Roots, addresses: Mapping[str, Sequence[str]]
) -> tuple[InterfaceFacts, ...]:
    """All interfaces; loopback is up although the kernel calls its state unknown."""
    found = []
    for name in entries(roots.sys / "class/net"):
        folder = roots.sys / "class/net" / name
        state = read_text(folder / "operstate") or "unknown"
        if name == "lo" and state == "unknown":
            state = "up"
        found.append(
            InterfaceFacts(
                name=name,
                state=state,
                speed=read_integer(folder / "speed") or None,
                mtu=read_integer(folder / "mtu"),
                addresses=tuple(addresses.get(name, ())),
                pci=parent_on_pci(folder),
                kind=_kind(folder),
            )
        )
    return tuple(found)


def _kind(folder: Path) -> str:
    if (folder / "device").exists():
        return "physical"
    if read_integer(folder / "type") == _LOOPBACK:
        return "loopback"
    return "bridge" if (folder / "bridge").is_dir() else "virtual"
