"""From what nodes say about themselves to what is wrong with them, and what to do. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hetero.device.topology import Distance
from hetero.startup.addresses import PORT_RANGE
from hetero.text import counted, size_text
from hetero.tools.preflight_checks.facts import NodeFacts
from hetero.tools.preflight_checks.network import Call, PathResult

_ROCE_PACKET = 4096
_LOCKED_MEMORY = 1 << 30
_SHARED_MEMORY, _TINY_SHARED_MEMORY = 1 << 30, 64 << 20
_OPEN_FILES = 4096
_NVIDIA_DMABUF_KERNEL = (5, 12)


class Severity(StrEnum):
    """What comes of it if nothing is done."""

    PROBLEM = "problem"
    """The run will fail."""
    WARNING = "warning"
    """The run will be slow, or a faster way will not be taken."""
    NOTE = "note"


@dataclass(frozen=True)
class Advice:
    """One thing that is wrong, and what to do about it, in a sentence."""

    severity: Severity
    subject: str
    text: str


def advise(facts: NodeFacts) -> list[Advice]:
    """All there is to say of one node, the worst first."""
    concerns = (_software, _gpus, _nics, _rdma_ports, _rails, _limits, _processors)
    found = [advice for concern in concerns for advice in concern(facts)]
    if facts.rdma:
        found += _verbs(facts)
    if facts.rdma and facts.gpus.usable:
        found += [*_gpu_memory(facts), *_peer_traffic(facts)]
    return worst_first(found)


def worst_first(advice: Sequence[Advice]) -> list[Advice]:
    order = list(Severity)
    return sorted(advice, key=lambda a: order.index(a.severity))


def _software(facts: NodeFacts) -> Iterator[Advice]:
    for line in facts.software.unmet:
        yield Advice(
            Severity.PROBLEM,
            "software",
            f"{line}; install this project again, or that package by itself",
        )
    if facts.software.another_core:
        yield Advice(Severity.PROBLEM, "software", facts.software.another_core)


def _gpus(facts: NodeFacts) -> Iterator[Advice]:
    gpus, subject = facts.gpus, "GPU"
    on_bus = {**gpus.displays, **gpus.on_bus}
    if gpus.usable:
        present = gpus.on_bus.get(gpus.vendor, 0)
        if len(gpus.usable) < present:
            reason = gpus.hidden_by or "look for lost GPUs in the kernel's log"
            yield Advice(
                Severity.NOTE if gpus.hidden_by else Severity.WARNING,
                subject,
                f"PyTorch sees {len(gpus.usable)} of {counted(present, 'GPU')} ({reason})",
            )
    elif not on_bus:
        yield Advice(Severity.NOTE, subject, "this node has no GPU; training would run on its CPU")
    else:
        vendor, count = next(iter((gpus.on_bus or gpus.displays).items()))
        yield Advice(
            Severity.PROBLEM if gpus.on_bus else Severity.NOTE,
            subject,
            f"PyTorch sees none of the node's {count} {vendor} GPUs; {_why_unseen(facts, vendor)}",
        )
    if gpus.simulated_by:
        yield Advice(
            Severity.NOTE,
            subject,
            f"{gpus.simulated_by} has training simulate a vendor; what is checked, measured and "
            f"written here is the node itself, {gpus.vendor}",
        )
    for gpu in gpus.usable:
        if gpu.link.lanes and gpu.link.lanes < gpu.link.most_lanes:
            yield Advice(
                Severity.WARNING,
                subject,
                f"GPU {gpu.index} runs on {gpu.link.lanes} of its {gpu.link.most_lanes} PCIe "
                "lanes; reseat it or its riser, or have its board looked at",
            )


def _why_unseen(facts: NodeFacts, vendor: str) -> str:
    wanted, build = ("ROCm", "rocm") if vendor == "amd" else ("CUDA", "cu")
    if facts.gpus.hidden_by:
        return f"{facts.gpus.hidden_by} hides them: unset it"
    if not facts.software.torch_build.startswith(build) or facts.software.torch_build == "cpu":
        return f"this PyTorch is built for {facts.software.torch_build}: install its {wanted} build"
    if not facts.gpus.driver:
        return f"no {wanted} driver is loaded: install it, or give the container the GPUs"
    return "see that this user may open the GPUs' device files and that the driver is new enough"


def _nics(facts: NodeFacts) -> Iterator[Advice]:
    if not facts.nics:
        yield Advice(
            Severity.NOTE,
            "network",
            "no NIC is up with an IP address; the node can only train alone",
        )
    # Interfaces of RDMA devices are spoken of with their ports.
    spoken_for = {port.interface for device in facts.rdma for port in device.ports}
    fastest = max((nic.rate for nic in facts.nics), default=0.0)
    for interface in facts.interfaces:
        down = interface.kind == "physical" and interface.state == "down"
        if down and interface.name not in spoken_for and facts.gpus.usable and not facts.rdma:
            yield Advice(
                Severity.NOTE, "network", f"{interface.name} is down; see its cable if it is meant"
            )
    if facts.gpus.usable and not facts.rdma and 0 < fastest < 100:
        yield Advice(
            Severity.WARNING,
            "network",
            f"the fastest NIC has {fastest:g} Gb/s and no RDMA; crossing between nodes will be "
            "slow: load the driver of the fast NICs (see `rdma link`)",
        )


def _rdma_ports(facts: NodeFacts) -> Iterator[Advice]:
    for device in facts.rdma:
        for port in device.ports:
            name = f"{device.name} port {port.number}"
            if port.interface:
                name += f" ({port.interface})"
            if not port.is_active:
                yield Advice(
                    Severity.WARNING,
                    "RDMA",
                    f"{name} is {port.state.lower()}, so one rail is lost; see its cable, its "
                    "switch port and `ip link`, or leave it out of --hetero-nics",
                )
                continue
            if port.on_ethernet and not any("." in a for a in port.roce_addresses):
                yield Advice(
                    Severity.WARNING,
                    "RDMA",
                    f"{name} has no IPv4 RoCE v2 address, so links cannot use it; give its "
                    "interface an IPv4 address",
                )
            if port.packet_bytes is not None and port.packet_bytes < _ROCE_PACKET:
                yield Advice(
                    Severity.WARNING,
                    "RDMA",
                    f"{name} sends packets of {port.packet_bytes} bytes; set the MTU of its "
                    "interface and of the switch to 9000 (4200 at least) for 4096",
                )
        if device.link.lanes and device.link.lanes < device.link.most_lanes:
            yield Advice(
                Severity.WARNING,
                "RDMA",
                f"{device.name} runs on {device.link.lanes} of its {device.link.most_lanes} "
                "PCIe lanes; reseat it, or move it to a wider slot",
            )


def _rails(facts: NodeFacts) -> Iterator[Advice]:
    # A hypervisor may show all devices below one bridge, wherever they really are.
    flat = facts.host.virtual_machine and all(
        r.distance is not Distance.SAME_SWITCH for r in facts.rails
    )
    if facts.rails and flat:
        yield Advice(
            Severity.NOTE,
            "topology",
            "this is a virtual machine that hides where GPUs and NICs are; compare rails with "
            "hetero perf links, or name them with --hetero-nics",
        )
        return
    for rail in facts.rails:
        if rail.distance is Distance.ACROSS_NUMA_NODES:
            yield Advice(
                Severity.WARNING,
                "topology",
                f"the NIC nearest to GPU {rail.gpu}, {rail.nic.name}, is on another socket; see "
                "whether its own NIC is down or missing",
            )
    by_nic: dict[str, list[int]] = {}
    for rail in facts.rails:
        by_nic.setdefault(rail.nic.name, []).append(rail.gpu)
    for name, sharing in by_nic.items():
        if len(sharing) > 1 and facts.rdma:
            yield Advice(
                Severity.NOTE,
                "topology",
                f"GPUs {', '.join(map(str, sharing))} share the NIC {name}",
            )


def _limits(facts: NodeFacts) -> Iterator[Advice]:
    limits, many = facts.host.limits, len(facts.gpus.usable) > 1
    if facts.rdma and limits.locked_memory is not None and limits.locked_memory < _LOCKED_MEMORY:
        yield Advice(
            Severity.WARNING,
            "limits",
            f"only {size_text(limits.locked_memory)} may be locked, so RDMA cannot register its "
            "buffers; set `ulimit -l unlimited` (docker --ulimit memlock=-1)",
        )
    if many and limits.shared_memory < _SHARED_MEMORY:
        tiny = limits.shared_memory <= _TINY_SHARED_MEMORY
        yield Advice(
            Severity.PROBLEM if tiny else Severity.WARNING,
            "limits",
            f"/dev/shm holds {size_text(limits.shared_memory)}, too little for {_library(facts)} "
            "and data loaders; give it some GiB (docker --shm-size 16g, or --ipc host)",
        )
    if facts.gpus.usable and limits.open_files is not None and limits.open_files < _OPEN_FILES:
        yield Advice(
            Severity.WARNING,
            "limits",
            f"{limits.open_files} open files are few for a large job; set `ulimit -n 65536`",
        )


def _library(facts: NodeFacts) -> str:
    return "RCCL" if facts.gpus.vendor == "amd" else "NCCL"


def _processors(facts: NodeFacts) -> Iterator[Advice]:
    if not facts.gpus.usable:
        return
    slow = [name for name in facts.host.governors if name != "performance"]
    if slow:
        yield Advice(
            Severity.WARNING,
            "CPU",
            f"the frequency governor is {', '.join(slow)}, which slows threads that drive links; "
            "set `cpupower frequency-set -g performance`",
        )
    if facts.host.numa_balancing and facts.host.numa_nodes > 1:
        yield Advice(
            Severity.WARNING,
            "CPU",
            "automatic NUMA balancing is on and stalls GPU work; set "
            "`sysctl kernel.numa_balancing=0`",
        )


def _verbs(facts: NodeFacts) -> Iterator[Advice]:
    """What keeps a process from using the RDMA devices at all."""
    direct = facts.gpudirect
    if not direct.libibverbs.usable:
        yield Advice(Severity.WARNING, "RDMA", direct.libibverbs.reason)
    if not direct.verbs_files:
        yield Advice(
            Severity.WARNING,
            "RDMA",
            "there are RDMA devices but no /dev/infiniband/uverbs*; `modprobe ib_uverbs`, or give "
            "the container the devices (docker --device /dev/infiniband)",
        )
    if direct.forbidden_files:
        yield Advice(
            Severity.WARNING,
            "RDMA",
            f"this user may not open /dev/infiniband/{', '.join(direct.forbidden_files)}; make "
            "them readable and writable for it (rdma-core's udev rules do)",
        )


def _gpu_memory(facts: NodeFacts) -> Iterator[Advice]:
    """What keeps a NIC from registering GPU memory."""
    missing = _missing_amd(facts) if facts.gpus.vendor == "amd" else _missing_nvidia(facts)
    if missing is not None:
        yield missing


def _missing_nvidia(facts: NodeFacts) -> Advice | None:
    direct = facts.gpudirect
    if direct.peer_modules:
        return None
    new_kernel = _kernel_release(facts.host.kernel) >= _NVIDIA_DMABUF_KERNEL
    if facts.gpus.open_driver and new_kernel:
        return Advice(
            Severity.NOTE,
            "GPU-direct",
            "nvidia_peermem is not loaded; GPU memory is registered through dma-buf, which the "
            "open kernel modules offer",
        )
    why = (
        "the proprietary kernel modules offer no dma-buf"
        if not facts.gpus.open_driver
        else f"kernel {facts.host.kernel} is too old for dma-buf"
    )
    return Advice(
        Severity.WARNING,
        "GPU-direct",
        f"nvidia_peermem is not loaded and {why}, so links go through host memory; "
        "`modprobe nvidia_peermem`, or use NVIDIA's open kernel modules on kernel 5.12 or newer",
    )


def _missing_amd(facts: NodeFacts) -> Advice | None:
    direct = facts.gpudirect
    if direct.peer_modules:
        return None
    unset = [name for name, value in direct.kernel_options.items() if value is False]
    if unset:
        return Advice(
            Severity.WARNING,
            "GPU-direct",
            f"the kernel lacks {', '.join(unset)} and amdgpu offers no peer memory, so links go "
            "through host memory; use a kernel with these options, or AMD's driver package "
            "with the NIC vendor's RDMA stack",
        )
    if None in direct.kernel_options.values():
        return Advice(
            Severity.NOTE,
            "GPU-direct",
            "the kernel's configuration cannot be read here; dma-buf needs "
            f"{', '.join(direct.kernel_options)} (see /boot/config-* on the host)",
        )
    return None


def _kernel_release(text: str) -> tuple[int, int]:
    numbers = text.replace("-", ".").split(".")[:2]
    if len(numbers) < 2 or not all(number.isdecimal() for number in numbers):
        return (0, 0)
    return (int(numbers[0]), int(numbers[1]))


def _peer_traffic(facts: NodeFacts) -> Iterator[Advice]:
    """What makes traffic between GPU and NIC take the long way, through the CPU."""
    direct = facts.gpudirect
    if direct.redirecting_ports:
        yield Advice(
            Severity.WARNING,
            "PCIe",
            f"access control services of {len(direct.redirecting_ports)} switch ports "
            f"({direct.redirecting_ports[0]} first) send GPU-to-NIC traffic through the CPU; turn "
            "ACS off in the firmware, or with setpci at boot",
        )
    elif direct.unread_ports:
        yield Advice(
            Severity.NOTE,
            "PCIe",
            f"whether ACS of {len(direct.unread_ports)} switch ports redirects GPU-to-NIC traffic "
            "can only be read by root; run once with sudo",
        )
    if any(kind.startswith("DMA") for kind in facts.host.iommu_types):
        yield Advice(
            Severity.WARNING,
            "PCIe",
            "the IOMMU translates device addresses, which slows GPU-direct or breaks it; add "
            "`iommu=pt` to the kernel's command line",
        )


_CLOCKS_APART = 1.0
_LAGGING = 0.5
"""Of the usual between the nodes."""
_UNEVEN = 1 / 3
"""Of the other direction. Measured for a moment, equal directions differ by a good deal."""


@dataclass(frozen=True)
class NodeCard:
    """What one node tells the others of itself."""

    number: int
    host: str
    network: str
    """Equal where two share a network, as containers or emulated nodes of one host do."""
    vendor: str
    gpus: tuple[str, ...]
    driver: str
    project: str
    torch: str
    megatron_core: str
    python: str
    collectives: str
    addresses: dict[str, str]
    """The NICs that its links would use, and their addresses."""
    mtus: dict[str, int]
    gloo_interfaces_amiss: tuple[str, ...]
    """Of those in GLOO_SOCKET_IFNAME, the ones that do not lead to other nodes."""

    def __str__(self) -> str:
        return f"node {self.number} ({self.host})"


def advise_cluster(
    cards: Sequence[NodeCard], calls: Sequence[Call], paths: Sequence[PathResult]
) -> list[Advice]:
    """All there is to say of several nodes together, the worst first."""
    found = [
        *_versions(cards),
        *_hosts(cards),
        *_calls(cards, calls),
        *_shared_interfaces(cards, calls),
        *_clocks(cards, calls),
        *_paths(cards, paths),
    ]
    return worst_first(found)


def _versions(cards: Sequence[NodeCard]) -> Iterator[Advice]:
    hang = "; process groups between different releases may hang as they start"
    for what, value, consequence in (
        ("releases of PyTorch", lambda c: c.torch, hang),
        ("versions of megatron-core", lambda c: c.megatron_core, ""),
        ("versions of this project", lambda c: c.project, ""),
    ):
        if sides := _sides(cards, value):
            yield Advice(
                Severity.PROBLEM,
                "versions",
                f"the nodes run different {what}: {sides}{consequence}; install one on all",
            )
    if sides := _sides(cards, lambda c: ".".join(c.python.split(".")[:2])):
        text = f"the nodes run different Pythons: {sides}; a run does not need the same"
        yield Advice(Severity.NOTE, "versions", text)
    for vendor in sorted({card.vendor for card in cards} - {"cpu"}):
        own = [card for card in cards if card.vendor == vendor]
        if sides := _sides(own, lambda c: c.collectives):
            yield Advice(
                Severity.PROBLEM,
                "versions",
                f"the {vendor} nodes run different collective libraries: {sides}; install one "
                "PyTorch build on all of them",
            )
        if sides := _sides(own, lambda c: c.driver):
            yield Advice(
                Severity.WARNING, "versions", f"the {vendor} nodes run different drivers: {sides}"
            )
        if sides := _sides(own, _gpu_text):
            yield Advice(
                Severity.WARNING,
                "GPU",
                f"the {vendor} nodes have different GPUs: {sides}; a mesh runs at the pace of its "
                "slowest",
            )


def _gpu_text(card: NodeCard) -> str:
    return f"{len(card.gpus)}x {', '.join(sorted(set(card.gpus)))}" if card.gpus else "none"


def _sides(cards: Sequence[NodeCard], value: Callable[[NodeCard], str]) -> str:
    """Who has which value, as text; empty where all have the same."""
    by_value: dict[str, list[str]] = {}
    for card in cards:
        by_value.setdefault(value(card) or "none", []).append(str(card))
    if len(by_value) < 2:
        return ""
    return "; ".join(f"{', '.join(nodes)}: {value}" for value, nodes in by_value.items())


def _hosts(cards: Sequence[NodeCard]) -> Iterator[Advice]:
    if len({card.network for card in cards}) < 2:
        return
    for card in cards:
        for name in card.gloo_interfaces_amiss:
            yield Advice(
                Severity.PROBLEM,
                "network",
                f"GLOO_SOCKET_IFNAME names {name} on {card}, which is no interface there that "
                "other nodes can reach; name one of that node, or leave the variable unset: a run "
                "then takes the interface that leads to rank 0",
            )
        if not card.addresses:
            yield Advice(
                Severity.PROBLEM,
                "network",
                f"{card} has no NIC with an IP address for links; name one with --hetero-nics",
            )
    for name in sorted({card.host for card in cards}):
        same = [card for card in cards if card.host == name]
        if len({card.network for card in same}) > 1:
            yield Advice(
                Severity.WARNING,
                "network",
                f"{len(same)} nodes are called {name}; logs and reports cannot tell them apart",
            )
    if sides := _sides(cards, lambda c: ", ".join(map(str, sorted(set(c.mtus.values()))))):
        yield Advice(
            Severity.WARNING,
            "network",
            f"the NICs have different MTUs: {sides}; large packets get lost on the way",
        )


def _calls(cards: Sequence[NodeCard], calls: Sequence[Call]) -> Iterator[Advice]:
    working = {(call.source, call.target) for call in calls if call.works}
    for call in calls:
        # Told once: the target's own call fails alike.
        is_told = call.source > call.target and _common_address(cards, call) is not None
        if call.works or is_told:
            continue
        # Links go on over the NICs that are left.
        others = (call.source, call.target) in working
        severity = Severity.WARNING if others else Severity.PROBLEM
        yield Advice(severity, "network", _why_it_fails(cards, call, others=others))


def _common_address(cards: Sequence[NodeCard], call: Call) -> str | None:
    """The address that both NICs of a call have, if they do."""
    own = cards[call.source].addresses.get(call.source_nic)
    return own if own == cards[call.target].addresses.get(call.target_nic) else None


def _why_it_fails(cards: Sequence[NodeCard], call: Call, *, others: bool) -> str:
    """What keeps a call from working, and the remedy. `others`: whether other NICs work."""
    source, target = cards[call.source], cards[call.target]
    nics = f"{call.source_nic} - {call.target_nic}"
    if (address := _common_address(cards, call)) is not None:
        return (
            f"{call.source_nic} of {source} and {call.target_nic} of {target} have the same "
            f"address, {address}: it leads from neither node to the other, like that of a bridge "
            "for containers; name other NICs with --hetero-nics"
        )
    if call.lost_bytes:
        return (
            f"packets of {call.lost_bytes} bytes get lost from {source} to {target} over {nics}, "
            f"where short ones arrive{' (other NICs work)' if others else ''}; set one MTU on "
            "both NICs and on the switches between, or the smallest of them on both NICs"
        )
    return (
        f"{source} cannot reach {target} over {nics} ({call.error})"
        f"{', but over others' if others else ''}; open the ports between the nodes "
        f"({PORT_RANGE}), see the routes, or name other NICs with --hetero-nics"
    )


def _shared_interfaces(cards: Sequence[NodeCard], calls: Sequence[Call]) -> Iterator[Advice]:
    """NICs whose packets leave by another one, as those of a second NIC in one subnet do."""
    ways: dict[tuple[int, str], dict[str, None]] = {}
    for call in calls:
        if call.works and call.leaves_by:
            ways.setdefault((call.source, call.leaves_by), {})[call.source_nic] = None
    for (node, interface), nics in ways.items():
        yield Advice(
            Severity.WARNING,
            "network",
            f"what {cards[node]} sends over {', '.join(nics)} leaves by {interface}, so that these "
            "rails share one NIC; give each NIC a subnet of its own, or a route by its source "
            "address (ip rule)",
        )


def _clocks(cards: Sequence[NodeCard], calls: Sequence[Call]) -> Iterator[Advice]:
    for target in range(1, len(cards)):
        seen = [
            call
            for call in calls
            if (call.source, call.target) == (0, target) and call.clock_difference is not None
        ]
        best = min(seen, key=lambda call: call.clock_uncertainty, default=None)
        if best is None or best.clock_difference is None:
            continue
        if abs(best.clock_difference) - best.clock_uncertainty > _CLOCKS_APART:
            way = "ahead of" if best.clock_difference > 0 else "behind"
            yield Advice(
                Severity.WARNING,
                "clock",
                f"the clock of {cards[target]} is {abs(best.clock_difference):.1f} s {way} that of "
                f"{cards[0]}, so that logs and traces do not fit together; start chrony or NTP",
            )


def _paths(cards: Sequence[NodeCard], paths: Sequence[PathResult]) -> Iterator[Advice]:
    by_path: dict[str, list[float]] = {}
    for result in paths:
        if not result.error:
            by_path.setdefault(result.path, []).append(result.one_way_gb_s)
    middle = {path: statistics.median(rates) for path, rates in by_path.items()}
    for result in paths:
        ends = f"{cards[result.source]} - {cards[result.target]}"
        if result.error:
            yield Advice(
                Severity.PROBLEM if result.path.startswith("auto") else Severity.WARNING,
                "bandwidth",
                f"{ends}: {result.path} failed ({result.error})",
            )
        elif result.one_way_gb_s < _LAGGING * middle[result.path]:
            yield Advice(
                Severity.WARNING,
                "bandwidth",
                f"{ends}: {result.path} reaches {result.one_way_gb_s:.2f} GB/s where "
                f"{middle[result.path]:.2f} is usual between the nodes; see cables, switch ports "
                "and MTU of this pair",
            )
        elif result.one_way_gb_s < _UNEVEN * max(result.there_gb_s, result.back_gb_s):
            yield Advice(
                Severity.WARNING,
                "bandwidth",
                f"{ends}: {result.path} is uneven, {result.there_gb_s:.2f} GB/s there and "
                f"{result.back_gb_s:.2f} back; see routes, flow control and errors of the NICs",
            )
