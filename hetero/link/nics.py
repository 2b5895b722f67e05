"""The NICs of a link: those that `--hetero-nics` names, and the RDMA ports of those.

A name stands for a network interface or an RDMA device, and includes the other kind of the same
hardware.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Iterator, Sequence
from ctypes import byref
from dataclasses import dataclass
from pathlib import Path

import psutil

from hetero.device.sysfs import entries, read_text
from hetero.device.topology import SYS, PciDevice, closeness, rdma_devices
from hetero.errors import LinkError
from hetero.native.binding import VerbsPort, checked, native
from hetero.startup.addresses import interface_address

INFINIBAND, ROCE = "InfiniBand", "RoCE"
_KIND_ROCE, _KIND_INFINIBAND = "RoCE v2", "IB/RoCE v1"
"""The types of a GID, as sysfs writes them."""
_SUBNET_PREFIX = len("fe80:0000:0000:0000")
_ACTIVE = 4
"""IBV_PORT_ACTIVE."""
_KINDS = {None: "IP", socket.AF_INET: "IPv4", socket.AF_INET6: "IPv6"}


@dataclass(frozen=True)
class Nics:
    """The NICs that one process uses: addresses for TCP, devices for RDMA."""

    addresses: tuple[str, ...] = ("127.0.0.1",)
    """At least one."""
    rdma: tuple[str, ...] = ()
    """RDMA devices, `name` or `name:port`; empty for those nearest to the GPU."""


LOOPBACK = Nics()


def find_nics(
    names: Sequence[str],
    *,
    own: str,
    family: socket.AddressFamily | None = None,
    sys_root: Path = SYS,
) -> Nics:
    """The NICs of these names; without names, the one with this rank's own address.

    An interface includes its RDMA devices, an RDMA device its interfaces. Each contributes its
    address of the given family, or any if None. Raises ValueError for all names that are neither.
    """
    if not names:
        return Nics(addresses=(own,))
    devices = {device.name: device for device in rdma_devices(sys_root=sys_root)}
    addresses: list[str] = []
    rdma: list[str] = []
    unknown: list[str] = []
    for name in names:
        bare = name.partition(":")[0]
        if bare in devices:
            rdma.append(name)
            found = [interface_address(interface, family) for interface in devices[bare].interfaces]
            addresses += [address for address in found if address is not None]
            continue
        address = interface_address(name, family)
        if address is None:
            unknown.append(name)
            continue
        addresses.append(address)
        rdma += [device.name for device in devices.values() if name in device.interfaces]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} neither a network "
            f"interface with an {_KINDS[family]} address (`ip address` lists them) nor an RDMA "
            f"device (here: {', '.join(devices) or 'none'})"
        )
    # InfiniBand devices need no IP address, but the control connection does.
    return Nics(
        addresses=tuple(dict.fromkeys(addresses)) or (own,),
        rdma=tuple(dict.fromkeys(rdma)),
    )


@dataclass(frozen=True)
class Port:
    """One active port of an RDMA device; both ends exchange theirs."""

    device: str
    number: int
    kind: str
    """INFINIBAND or ROCE, which cannot be mixed on a rail."""
    gid: str
    """The address of the port, in eight groups of hexadecimal digits."""
    gid_index: int
    lid: int
    mtu: int
    """An enum ibv_mtu: a larger number is a larger packet."""
    max_message: int
    network: str
    """The IP network or InfiniBand subnet prefix of the port; empty if unknown."""

    def __str__(self) -> str:
        return f"{self.device}:{self.number}"

    def needs_route_to(self, other: Port) -> bool:
        """Returns whether packets need a global route header: not within one InfiniBand subnet."""
        return self.kind != INFINIBAND or self.network != other.network


def rdma_missing() -> str | None:
    """Why this host cannot use RDMA; None if it has a device and libibverbs.

    Only opening a link shows whether a port is up and reaches the peer.
    """
    if not rdma_devices():
        return f"{socket.gethostname()} has no RDMA device"
    return libibverbs_missing()


def libibverbs_missing() -> str | None:
    """Why libibverbs cannot be used here, with the packages to install; None if it can."""
    try:
        checked(native().ibverbs_load)
    except LinkError as reason:
        return (
            f"{socket.gethostname()} cannot use libibverbs ({reason}); install it (Debian, Ubuntu: "
            "libibverbs1 and ibverbs-providers; RHEL: libibverbs)"
        )
    return None


def nearest_devices(gpu: PciDevice | None, *, sys_root: Path = SYS) -> tuple[str, ...]:
    """All RDMA devices nearest to the GPU; without a GPU, all of them."""
    devices = rdma_devices(sys_root=sys_root)
    if gpu is None or not devices:
        return tuple(device.name for device in devices)
    best = min(closeness(gpu, device.pci) for device in devices)
    return tuple(device.name for device in devices if closeness(gpu, device.pci) == best)


def find_ports(devices: Sequence[str], *, sys_root: Path = SYS) -> list[Port]:
    """All usable ports of the devices; `name:2` stands for port 2 alone.

    Raises LinkError with the reason for each port if no port is usable.
    """
    if not devices:
        raise LinkError("this host has no RDMA device; load the NIC's driver (see `rdma link`)")
    ports: list[Port] = []
    unfit: list[str] = []
    for entry in devices:
        name, _, number = entry.partition(":")
        folder = sys_root / "class/infiniband" / name / "ports"
        for port in [number] if number.isdecimal() else entries(folder) or ["1"]:
            try:
                ports.append(_describe(folder / port, name, int(port)))
            except LinkError as error:
                unfit.append(f"{name}:{port} {error}")
    if not ports:
        raise LinkError(
            f"no RDMA port can be used: {'; '.join(unfit)}; bring a port up, give its interface "
            "an IPv4 address, or name other NICs with --hetero-nics"
        )
    return ports


def _describe(folder: Path, device: str, number: int) -> Port:
    """Query a port. Raises LinkError with why it is unusable, without the port's name."""
    port = VerbsPort()
    checked(native().verbs_query_port, device.encode(), number, byref(port))
    if port.state != _ACTIVE:
        raise LinkError("is not active")
    address = choose_gid(read_gids(folder), on_ethernet=port.is_ethernet)
    if address is None:
        raise LinkError(f"has no {'RoCE v2' if port.is_ethernet else 'InfiniBand'} address")
    gid = address.address.exploded
    return Port(
        device=device,
        number=number,
        kind=ROCE if port.is_ethernet else INFINIBAND,
        gid=gid,
        gid_index=address.index,
        lid=int(port.lid),
        mtu=int(port.mtu),
        max_message=int(port.max_message),
        network=_ip_network(address.address) if port.is_ethernet else gid[:_SUBNET_PREFIX],
    )


@dataclass(frozen=True)
class Gid:
    """One address of a port."""

    index: int
    kind: str
    """The type of the GID, as sysfs writes it."""
    address: ipaddress.IPv6Address


def read_gids(port: Path) -> Iterator[Gid]:
    """The GIDs of a port, in order, given its folder in sysfs.

    With some drivers a table has a thousand entries, nearly all empty, and it is read for every
    link: so each is read as it is asked for.
    """
    for index in entries(port / "gids"):
        text = read_text(port / "gids" / index)
        if text.strip("0:"):
            with contextlib.suppress(ValueError):
                address = ipaddress.IPv6Address(text)
                yield Gid(int(index), read_text(port / "gid_attrs/types" / index), address)


def choose_gid(gids: Iterable[Gid], *, on_ethernet: bool) -> Gid | None:
    """The GID to use: of the right kind and, on Ethernet, IPv4 before IPv6.

    Takes the first that fits, and reads no further. Never a link-local address on Ethernet: it does
    not show which ports reach each other.
    """
    other = None
    for gid in gids:
        if gid.kind != (_KIND_ROCE if on_ethernet else _KIND_INFINIBAND):
            continue
        if gid.address.ipv4_mapped or not on_ethernet:
            return gid
        if other is None and not gid.address.is_link_local:
            other = gid
    return other


def pair_ports(ours: Sequence[Port], theirs: Sequence[Port]) -> list[tuple[int, int]]:
    """Match ports of both ends to rails, as pairs of indices.

    Match ports of the same network. If no two share one, assume a routed fabric and match ports of
    the same kind, in order.
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


def _ip_network(gid: ipaddress.IPv6Address) -> str:
    """The IP network of a RoCE address on this host; empty if no interface has it."""
    mapped = gid.ipv4_mapped
    for addresses in psutil.net_if_addrs().values():
        for entry in addresses:
            if entry.family == socket.AF_INET and entry.address == str(mapped) and entry.netmask:
                return str(ipaddress.ip_network(f"{mapped}/{entry.netmask}", strict=False))
    return ""
