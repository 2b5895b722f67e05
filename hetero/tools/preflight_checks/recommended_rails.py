"""Which NIC each GPU should use: what to pass to --hetero-nics."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from hetero.device.topology import Distance, PciDevice, closeness, distance
from hetero.tools.preflight_checks.gpu_facts import GpuFacts
from hetero.tools.preflight_checks.network import InterfaceFacts
from hetero.tools.preflight_checks.rdma_facts import RdmaFacts

# A NIC that is slower than this share of the fastest serves management, not training.
_FAST_ENOUGH = 0.5


@dataclass(frozen=True)
class Nic:
    """A NIC that could be a rail: its interface, and its RDMA device where it has one."""

    name: str
    """Of the network interface, or of the RDMA device where that has no interface."""
    rdma: str | None
    address: str | None
    """IPv4 where it has one."""
    pci: PciDevice | None
    rate: float
    """Gb/s; 0 where not told."""


@dataclass(frozen=True)
class Rail:
    """The NIC recommended for one GPU."""

    gpu: int
    nic: Nic
    distance: Distance


def candidates(interfaces: Sequence[InterfaceFacts], rdma: Sequence[RdmaFacts]) -> tuple[Nic, ...]:
    """The NICs fit for training: RDMA devices with an active port, else the fast interfaces."""
    by_name = {interface.name: interface for interface in interfaces}
    nics = [
        Nic(
            name=port.interface or device.name,
            rdma=device.name,
            address=by_name[port.interface].address if port.interface in by_name else None,
            pci=device.pci,
            rate=port.rate,
        )
        for device in rdma
        for port in device.active_ports
    ]
    nics = nics or _interfaces(interfaces)
    fastest = max((nic.rate for nic in nics), default=0.0)
    return tuple(nic for nic in nics if nic.rate >= fastest * _FAST_ENOUGH)


def _interfaces(interfaces: Sequence[InterfaceFacts]) -> list[Nic]:
    """Physical interfaces; virtual ones where they are faster, as a bond is, or all there is.

    Not those with a link-local address (169.254), which leads to a host's own management.
    """
    nics: dict[str, list[Nic]] = {"physical": [], "virtual": []}
    for i in interfaces:
        if i.kind not in nics or not i.is_up or i.address is None:
            continue
        if not ipaddress.ip_address(i.address).is_link_local:
            nics[i.kind].append(Nic(i.name, None, i.address, i.pci, (i.speed or 0) / 1000))
    fastest = {kind: max((nic.rate for nic in found), default=-1.0) for kind, found in nics.items()}
    return nics["virtual" if fastest["virtual"] > fastest["physical"] else "physical"]


def recommend(gpus: Sequence[GpuFacts], nics: Sequence[Nic]) -> tuple[Rail, ...]:
    """For each GPU the nearest NIC, and among equally near ones the least used so far."""
    used = dict.fromkeys((nic.name for nic in nics), 0)
    rails = []
    for gpu in gpus if nics else ():
        best = min(nics, key=lambda nic: (*closeness(gpu.pci, nic.pci), used[nic.name]))
        used[best.name] += 1
        rails.append(Rail(gpu=gpu.index, nic=best, distance=distance(gpu.pci, best.pci)))
    return tuple(rails)
