"""Which ports of which NICs carry a link, and what has to be known of each.

Nothing about a port is assumed: its state, its address, its largest packet and its largest message
are asked of the device.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from hetero.device.topology import SYS, PciDevice, closeness, rdma_devices
from hetero.errors import LinkError
from hetero.transport.verbs.library import Verbs

INFINIBAND, ROCE = "InfiniBand", "RoCE"
# The first four groups of a GID.
_SUBNET_PREFIX = len("fe80:0000:0000:0000")


@dataclass(frozen=True)
class Port:
    """One active port of an RDMA device, as its peer has to know it."""

    device: str
    number: int
    kind: str
    """INFINIBAND or ROCE: the two cannot talk to each other."""
    gid: str
    """In pyverbs' form of eight groups."""
    gid_index: int
    lid: int
    mtu: int
    """The verbs number of its largest packet; a larger number is a larger packet."""
    max_message: int
    network: str
    """What it reaches without a router: an IP network or a subnet prefix; empty if unknown."""

    def __str__(self) -> str:
        return f"{self.device}:{self.number}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def needs_route_to(self, other: Port) -> bool:
        """Whether packets to it carry a global route; within one InfiniBand subnet they do not."""
        return self.kind != INFINIBAND or self.network != other.network


def choose_devices(
    gpu: PciDevice | None, named: Sequence[str] = (), *, sys_root: Path = SYS
) -> tuple[str, ...]:
    """The devices named, or else those nearest to the GPU: all that are equally near.

    Without a GPU every device is equally near.
    """
    if named:
        return tuple(named)
    devices = rdma_devices(sys_root=sys_root)
    if gpu is None or not devices:
        return tuple(device.name for device in devices)
    best = min(closeness(gpu, device.pci) for device in devices)
    return tuple(device.name for device in devices if closeness(gpu, device.pci) == best)


def find_ports(verbs: Verbs, devices: Sequence[str]) -> list[Port]:
    """All usable ports of the devices; `name:2` stands for port 2 alone.

    Raises LinkError when there is none, with what is wrong with each that was looked at.
    """
    if not devices:
        raise LinkError("this host has no RDMA device; load the NIC's driver (see `rdma link`)")
    ports: list[Port] = []
    unfit: list[str] = []
    for entry in devices:
        name, _, number = entry.partition(":")
        try:
            context = verbs.Context(name=name)
        except verbs.error as error:
            unfit.append(f"{name} cannot be opened ({error})")
            continue
        with context:
            count = context.query_device().phys_port_cnt
            for port in [int(number)] if number.isdecimal() else range(1, count + 1):
                found = _describe(verbs, context, name, port)
                if isinstance(found, Port):
                    ports.append(found)
                else:
                    unfit.append(found)
    if not ports:
        raise LinkError(
            f"no RDMA port can be used: {'; '.join(unfit)}; bring a port up, give its interface "
            "an IPv4 address, or name other NICs with --hetero-nics"
        )
    return ports


def _describe(verbs: Verbs, context: Any, device: str, number: int) -> Port | str:
    """A port, or why it cannot be used."""
    enums = verbs.enums
    try:
        port = context.query_port(number)
    except verbs.error as error:
        return f"{device}:{number} cannot be asked ({error})"
    if port.state != enums.IBV_PORT_ACTIVE:
        return f"{device}:{number} is not active"
    on_ethernet = port.link_layer == enums.IBV_LINK_LAYER_ETHERNET
    entries = [e for e in context.query_gid_table(port.gid_tbl_len) if e.port_num == number]
    kind = enums.IBV_GID_TYPE_ROCE_V2 if on_ethernet else enums.IBV_GID_TYPE_IB
    entry = choose_gid(entries, kind, on_ethernet=on_ethernet)
    if entry is None:
        return f"{device}:{number} has no {'RoCE v2' if on_ethernet else 'InfiniBand'} address"
    gid = gid_text(entry)
    return Port(
        device=device,
        number=number,
        kind=ROCE if on_ethernet else INFINIBAND,
        gid=gid,
        gid_index=int(entry.gid_index),
        lid=int(port.lid),
        mtu=int(port.active_mtu),
        max_message=int(port.max_msg_sz),
        network=_ip_network(gid) if on_ethernet else gid[:_SUBNET_PREFIX],
    )


def choose_gid(entries: Sequence[Any], kind: int, *, on_ethernet: bool) -> Any | None:
    """The address to use among a port's: of the right kind and, on Ethernet, IPv4 before IPv6.

    A table holds the same address several times, by version of RoCE, in no fixed order. Link-local
    addresses of Ethernet are left out: they say nothing about which ports reach each other.
    """
    fitting = [entry for entry in entries if entry.gid_type == kind]
    if on_ethernet:
        mapped = [entry for entry in fitting if _address(entry).ipv4_mapped]
        fitting = mapped or [entry for entry in fitting if not _address(entry).is_link_local]
    return min(fitting, key=lambda entry: int(entry.gid_index), default=None)


def pair_ports(ours: Sequence[Port], theirs: Sequence[Port]) -> list[tuple[int, int]]:
    """Which port of one end is joined with which of the other, as indices; one rail a pair.

    Ports in one network go together. Where no two share a network, the fabric is taken to be
    routed, and ports of one kind go together in their order.
    """
    for fits in (
        lambda a, b: a.kind == b.kind and a.network == b.network != "",
        lambda a, b: a.kind == b.kind,
    ):
        pairs: list[tuple[int, int]] = []
        free = list(range(len(theirs)))
        for index, port in enumerate(ours):
            other = next((j for j in free if fits(port, theirs[j])), None)
            if other is not None:
                free.remove(other)
                pairs.append((index, other))
        if pairs:
            return pairs
    return []


def gid_text(entry: Any) -> str:
    """A GID as pyverbs writes it; a method up to some releases, a property in others."""
    text = entry.gid_str
    return str(text() if callable(text) else text)


def _address(entry: Any) -> ipaddress.IPv6Address:
    return ipaddress.IPv6Address(gid_text(entry))


def _ip_network(gid: str) -> str:
    """The IP network of a RoCE address on this host; empty where its interface is not known."""
    mapped = ipaddress.IPv6Address(gid).ipv4_mapped
    for addresses in psutil.net_if_addrs().values():
        for entry in addresses:
            if entry.family == socket.AF_INET and entry.address == str(mapped) and entry.netmask:
                return str(ipaddress.ip_network(f"{mapped}/{entry.netmask}", strict=False))
    return ""
