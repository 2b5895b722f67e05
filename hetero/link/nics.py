"""What `--hetero-nics` names: network interfaces, RDMA devices, or one by the name of the other."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.device.topology import SYS, rdma_devices
from hetero.startup.addresses import interface_address

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
