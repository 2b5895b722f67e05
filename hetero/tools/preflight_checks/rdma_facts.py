"""The RDMA devices of a node and their ports."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetero.device.sysfs import entries, read_text
from hetero.device.topology import PciDevice, rdma_devices
from hetero.tools.preflight_checks.network import InterfaceFacts
from hetero.tools.preflight_checks.pci import PcieLink, read_pcie_link
from hetero.tools.preflight_checks.roots import Roots, Tool

# Packets on the wire carry up to 60 bytes of headers beside the payload (RoCE v2 over IPv6).
_ROCE_HEADERS = 60
_PACKET_SIZES = (4096, 2048, 1024, 512, 256)
_NO_ADDRESS = ipaddress.IPv6Address(0)
_RATE = re.compile(r"[0-9]+(\.[0-9]+)?")


@dataclass(frozen=True)
class RdmaPort:
    """One port of an RDMA device."""

    number: int
    state: str
    link_layer: str
    rate: float
    """Gigabits per second."""
    interface: str | None
    roce_addresses: tuple[str, ...]
    """Its RoCE v2 addresses: IPv4 where mapped, link-local ones left out."""
    packet_bytes: int | None
    """The largest payload of a packet; None where it cannot be told."""

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def on_ethernet(self) -> bool:
        return self.link_layer == "Ethernet"


@dataclass(frozen=True)
class RdmaFacts:
    """One RDMA device."""

    name: str
    model: str
    firmware: str
    pci: PciDevice | None
    link: PcieLink
    ports: tuple[RdmaPort, ...]

    @property
    def active_ports(self) -> tuple[RdmaPort, ...]:
        return tuple(port for port in self.ports if port.is_active)

    @property
    def rate(self) -> float:
        """Of its fastest active port, in Gb/s; 0 where none is active."""
        return max((port.rate for port in self.active_ports), default=0.0)


def read_rdma(
    roots: Roots, interfaces: Sequence[InterfaceFacts], *, tool: Tool
) -> tuple[RdmaFacts, ...]:
    """All RDMA devices. `ibv_devinfo` is asked for what sysfs does not have: InfiniBand's MTU."""
    devices = rdma_devices(sys_root=roots.sys)
    told = _devinfo_packets(tool(["ibv_devinfo"])) if devices else {}
    mtus = {interface.name: interface.mtu for interface in interfaces}
    found = []
    for device in devices:
        folder = roots.sys / "class/infiniband" / device.name
        ports = []
        for number in entries(folder / "ports"):
            port = _read_port(folder / "ports" / number, int(number), device.interfaces)
            packet = told.get((device.name, port.number))
            if packet is None and port.on_ethernet and port.interface in mtus:
                packet = _packet_for_mtu(mtus[port.interface])
            ports.append(replace(port, packet_bytes=packet))
        address = device.pci.address if device.pci else None
        found.append(
            RdmaFacts(
                name=device.name,
                model=read_text(folder / "hca_type"),
                firmware=read_text(folder / "fw_ver"),
                pci=device.pci,
                link=read_pcie_link(roots, address),
                ports=tuple(ports),
            )
        )
    return tuple(found)


def _read_port(folder: Path, number: int, interfaces: Sequence[str]) -> RdmaPort:
    rate = _RATE.match(read_text(folder / "rate"))
    addresses, named = _roce_addresses(folder)
    beside = interfaces[number - 1] if len(interfaces) >= number else None
    return RdmaPort(
        number=number,
        state=read_text(folder / "state").partition(":")[2].strip() or "unknown",
        link_layer=read_text(folder / "link_layer"),
        rate=float(rate.group()) if rate else 0.0,
        interface=named or beside,
        roce_addresses=addresses,
        packet_bytes=None,
    )


def _roce_addresses(port: Path) -> tuple[tuple[str, ...], str | None]:
    """The port's RoCE v2 addresses, and the interface that they belong to."""
    found: list[str] = []
    interface = None
    for index in entries(port / "gids"):
        if read_text(port / "gid_attrs/types" / index) != "RoCE v2":
            continue
        try:
            address = ipaddress.IPv6Address(read_text(port / "gids" / index))
        except ValueError:
            continue
        interface = interface or read_text(port / "gid_attrs/ndevs" / index) or None
        if address != _NO_ADDRESS and not address.is_link_local:
            found.append(str(address.ipv4_mapped or address))
    return tuple(found), interface


def _packet_for_mtu(mtu: int | None) -> int | None:
    return next((s for s in _PACKET_SIZES if mtu is not None and s + _ROCE_HEADERS <= mtu), None)


def _devinfo_packets(text: str) -> dict[tuple[str, int], int]:
    """Active MTU by device and port, from what `ibv_devinfo` prints."""
    found: dict[tuple[str, int], int] = {}
    device, port = "", 0
    for line in text.splitlines():
        key, _, value = line.strip().partition(":")
        value = value.strip()
        if key == "hca_id":
            device = value
        elif key == "port" and value.isdecimal():
            port = int(value)
        elif key == "active_mtu" and value.split(" ")[0].isdecimal():
            found[device, port] = int(value.split(" ")[0])
    return found
