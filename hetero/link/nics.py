"""What `--hetero-nics` names: network interfaces, RDMA devices, or one by the name of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.device.topology import SYS, rdma_devices
from hetero.link.tcp_connections import address_towards, interface_address


@dataclass(frozen=True)
class Nics:
    """The rails of one process: addresses for TCP, devices for RDMA."""

    addresses: tuple[str, ...]
    """IPv4, at least one."""
    rdma: tuple[str, ...]
    """RDMA devices, `name` or `name:port`; empty for those nearest to the GPU."""


def find_nics(names: Sequence[str], *, towards: str, sys_root: Path = SYS) -> Nics:
    """The NICs of these names; without names, the interface that leads to the host `towards`.

    An interface brings the RDMA devices on it, an RDMA device the interfaces under it. Raises
    ValueError, in one sentence, for a name that is neither.
    """
    if not names:
        return Nics(addresses=(address_towards(towards),), rdma=())
    devices = {device.name: device for device in rdma_devices(sys_root=sys_root)}
    addresses: list[str] = []
    rdma: list[str] = []
    for name in names:
        bare = name.partition(":")[0]
        if bare in devices:
            rdma.append(name)
            found = [interface_address(interface) for interface in devices[bare].interfaces]
            addresses += [address for address in found if address is not None]
            continue
        address = interface_address(name)
        if address is None:
            known = ", ".join(devices) or "none"
            raise ValueError(
                f"{name} is neither a network interface with an IPv4 address (`ip address` lists "
                f"them) nor an RDMA device (here: {known})"
            )
        addresses.append(address)
        rdma += [device.name for device in devices.values() if name in device.interfaces]
    # InfiniBand devices need no address of their own, but the ends have to meet somewhere.
    return Nics(
        addresses=tuple(dict.fromkeys(addresses)) or (address_towards(towards),),
        rdma=tuple(dict.fromkeys(rdma)),
    )
