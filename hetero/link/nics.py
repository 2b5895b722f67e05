"""What `--hetero-nics` names: network interfaces, RDMA devices, or one by the name of the other."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.addresses import interface_address
from hetero.device.topology import SYS, rdma_devices

_KINDS = {None: "IP", socket.AF_INET: "IPv4", socket.AF_INET6: "IPv6"}


@dataclass(frozen=True)
class Nics:
    """The NICs that one process uses: addresses for TCP, devices for RDMA."""

    addresses: tuple[str, ...]
    """At least one."""
    rdma: tuple[str, ...]
    """RDMA devices, `name` or `name:port`; empty for those nearest to the GPU."""


def find_nics(
    names: Sequence[str],
    *,
    own: str,
    family: socket.AddressFamily | None = None,
    sys_root: Path = SYS,
) -> Nics:
    """The NICs of these names; without names, the one with this rank's own address.

    An interface includes its RDMA devices, an RDMA device its interfaces. Each contributes its
    address of the given family, or any if None. Raises ValueError for a name that is neither.
    """
    if not names:
        return Nics(addresses=(own,), rdma=())
    devices = {device.name: device for device in rdma_devices(sys_root=sys_root)}
    addresses: list[str] = []
    rdma: list[str] = []
    for name in names:
        bare = name.partition(":")[0]
        if bare in devices:
            rdma.append(name)
            found = [interface_address(interface, family) for interface in devices[bare].interfaces]
            addresses += [address for address in found if address is not None]
            continue
        address = interface_address(name, family)
        if address is None:
            known = ", ".join(devices) or "none"
            raise ValueError(
                f"{name} is neither a network interface with an {_KINDS[family]} address (`ip "
                f"address` lists them) nor an RDMA device (here: {known})"
            )
        addresses.append(address)
        rdma += [device.name for device in devices.values() if name in device.interfaces]
    # InfiniBand devices need no IP address, but the control connection does.
    return Nics(
        addresses=tuple(dict.fromkeys(addresses)) or (own,),
        rdma=tuple(dict.fromkeys(rdma)),
    )
