"""Everything that one node says about itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero.device.topology import Distance
from hetero.tools.preflight_checks.gpu_facts import (
    GpuInventory,
    VisibleGpu,
    read_gpus,
    visible_gpus,
)
from hetero.tools.preflight_checks.gpudirect import (
    GpuDirectFacts,
    Libibverbs,
    read_gpudirect,
    read_libibverbs,
)
from hetero.tools.preflight_checks.host_facts import HostFacts, Limits, read_host, read_limits
from hetero.tools.preflight_checks.network import InterfaceFacts, live_addresses, read_interfaces
from hetero.tools.preflight_checks.rdma_facts import RdmaFacts, read_rdma
from hetero.tools.preflight_checks.recommended_rails import Nic, Rail, candidates, recommend
from hetero.tools.preflight_checks.roots import Roots, Tool, run_tool
from hetero.tools.preflight_checks.software import SoftwareFacts, read_software


@dataclass(frozen=True)
class SystemFacts:
    """What is asked of the running system and not of a file; a test makes it up."""

    software: SoftwareFacts
    gpus: Sequence[VisibleGpu]
    addresses: Mapping[str, Sequence[str]]
    limits: Limits
    libibverbs: Libibverbs
    vendor: str | None = None
    """None for that of the running PyTorch."""
    tool: Tool = field(default=run_tool)

    @classmethod
    def here(cls) -> SystemFacts:
        return cls(
            software=read_software(),
            gpus=visible_gpus(),
            addresses=live_addresses(),
            limits=read_limits(),
            libibverbs=read_libibverbs(),
        )


@dataclass(frozen=True)
class NodeFacts:
    """One node."""

    host: HostFacts
    software: SoftwareFacts
    gpus: GpuInventory
    interfaces: tuple[InterfaceFacts, ...]
    rdma: tuple[RdmaFacts, ...]
    nics: tuple[Nic, ...]
    """Those fit for training."""
    rails: tuple[Rail, ...]
    """The NIC recommended for each GPU."""
    gpudirect: GpuDirectFacts

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def recommended_nics(self) -> tuple[str, ...]:
        """What to pass to --hetero-nics on this node: each GPU's NIC, or all that are fit."""
        names = [rail.nic.name for rail in self.rails] or [nic.name for nic in self.nics]
        return tuple(dict.fromkeys(names))


def read_node(roots: Roots, system: SystemFacts) -> NodeFacts:
    host = read_host(roots, system.limits)
    gpus = read_gpus(roots, system.gpus, vendor=system.vendor, tool=system.tool)
    interfaces = read_interfaces(roots, system.addresses)
    rdma = read_rdma(roots, interfaces, tool=system.tool)
    nics = candidates(interfaces, rdma)
    rails = recommend(gpus.usable, nics)
    places = {gpu.index: gpu.pci for gpu in gpus.usable}
    pairs = [
        (gpu, rail.nic.pci)
        for rail in rails
        if rail.distance is Distance.SAME_SWITCH
        and (gpu := places[rail.gpu]) is not None
        and rail.nic.pci is not None
    ]
    return NodeFacts(
        host=host,
        software=system.software,
        gpus=gpus,
        interfaces=interfaces,
        rdma=rdma,
        nics=nics,
        rails=rails,
        gpudirect=read_gpudirect(
            roots, kernel=host.kernel, libibverbs=system.libibverbs, pairs=pairs
        ),
    )
