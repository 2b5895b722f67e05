"""From what a node says about itself to what is wrong with it, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hetero.device.topology import Distance
from hetero.text import counted, size_text
from hetero.tools.preflight_checks.node_facts import NodeFacts

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
