"""What a check found: as text, at most a hundred columns wide, as JSON, and as a cluster file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from hetero.planner.accelerators import match_driver_name
from hetero.startup.addresses import is_loopback
from hetero.text import counted, size_text
from hetero.tools.preflight_checks.checks import Advice, NodeCard, Severity
from hetero.tools.preflight_checks.facts import GpuDirectFacts, HostFacts, NodeFacts
from hetero.tools.preflight_checks.network import Call, CopyResult, PathResult
from hetero.tools.reports.text_table import aligned

WIDTH = 98
_LABEL = 12
_NODE_HEAD = ("", "host", "vendor", "GPUs", "driver", "PyTorch", "collectives")


@dataclass(frozen=True)
class NodeReport:
    """What one node said, as it travels to the others."""

    card: NodeCard
    facts: dict[str, Any]
    lines: list[str]
    advice: list[Advice]

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> NodeReport:
        card = dict(record["card"])
        for name in ("gpus", "gloo_interfaces_amiss"):
            card[name] = tuple(card[name])
        advice = [
            Advice(Severity(a["severity"]), a["subject"], a["text"]) for a in record["advice"]
        ]
        return cls(NodeCard(**card), dict(record["facts"]), list(record["lines"]), advice)


@dataclass(frozen=True)
class Report:
    """Everything that was found, of every node and between them."""

    nodes: Sequence[NodeReport]
    calls: Sequence[Call]
    paths: Sequence[PathResult]
    between_nodes: Sequence[Advice]
    emulated: bool

    @property
    def advice(self) -> list[Advice]:
        return [*(entry for node in self.nodes for entry in node.advice), *self.between_nodes]

    @property
    def has_problem(self) -> bool:
        return any(entry.severity is Severity.PROBLEM for entry in self.advice)

    @property
    def verdict(self) -> str:
        said = verdict(self.advice, nodes=len(self.nodes))
        return f"{said} (emulated: every process played a node)" if self.emulated else said

    def lines(self, *, brief: bool) -> Iterator[str]:
        """All but the verdict; `brief` leaves out what is only there to be known."""
        for node in self.nodes:
            yield f"{node.card}: {node.card.vendor}{', emulated' if self.emulated else ''}"
            yield from node.lines if not brief else ()
            yield from advice_lines(node.advice)
            yield ""
        if len(self.nodes) > 1:
            yield "between the nodes"
            cards = [node.card for node in self.nodes]
            yield from () if brief else cluster_lines(cards, self.calls, self.paths)
            yield from advice_lines(self.between_nodes)
            yield ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "ready": not self.has_problem,
            "emulated": self.emulated,
            "nodes": [asdict(node) for node in self.nodes],
            "calls": [asdict(call) for call in self.calls],
            "paths": [asdict(pair) for pair in self.paths],
            "advice": [asdict(entry) for entry in self.between_nodes],
        }


def node_lines(facts: NodeFacts, copies: Sequence[CopyResult]) -> list[str]:
    """Everything about one node but the advice."""
    blocks: list[tuple[str, list[str]]] = [
        ("software", [_software(facts)]),
        ("host", [_host(facts.host)]),
        ("limits", [_limits(facts.host)]),
        ("GPU", _gpus(facts, copies)),
        ("network", _interfaces(facts)),
        ("RDMA", _rdma(facts)),
        ("GPU-direct", [_gpudirect(facts.gpudirect)] if facts.rdma else []),
        ("rails", _rails(facts)),
    ]
    return [line for label, rows in blocks for line in _block(label, rows)]


def path_lines(results: Sequence[PathResult]) -> list[str]:
    """The ways between two processes of one node."""
    return _block("bandwidth", _paths([("this node", result) for result in results]))


def cluster_lines(
    cards: Sequence[NodeCard], calls: Sequence[Call], paths: Sequence[PathResult]
) -> list[str]:
    """What was tried between the nodes."""
    ways = [(f"{path.source} - {path.target}", path) for path in paths]
    return [
        *_block("nodes", aligned([_NODE_HEAD, *map(_node_row, cards)])),
        *(_block("ports", aligned(_port_rows(calls))) if calls else []),
        *(_block("bandwidth", _paths(ways)) if ways else []),
    ]


def _node_row(card: NodeCard) -> tuple[str, ...]:
    gpus = f"{len(card.gpus)}x {card.gpus[0]}" if card.gpus else "none"
    return (
        str(card.number),
        card.host,
        card.vendor,
        gpus,
        card.driver or "-",
        card.torch,
        card.collectives or "-",
    )


def _port_rows(calls: Sequence[Call]) -> list[tuple[str, ...]]:
    """One row for each NIC of a pair of nodes, both directions together."""
    by_rail = {(c.source, c.target, c.source_nic, c.target_nic): c for c in calls}
    rows: list[tuple[str, ...]] = [("between", "NICs", "reached", "clock difference")]
    for call in calls:
        back = by_rail.get((call.target, call.source, call.target_nic, call.source_nic))
        if back is not None and call.source > call.target:
            continue
        there_works, back_works = call.works, back is not None and back.works
        reached = "neither way"
        if there_works or back_works:
            reached = "only there" if not back_works else "only back"
        if there_works and back_works:
            reached = "both ways"
        clock = "-"
        if call.clock_difference is not None:
            clock = f"{call.clock_difference * 1e3:+.2f} ms ±{call.clock_uncertainty * 1e3:.2f}"
        nics = f"{call.source_nic} - {call.target_nic}"
        rows.append((f"{call.source} - {call.target}", nics, reached, clock))
    return rows


def advice_lines(advice: Iterable[Advice]) -> list[str]:
    lines = []
    for entry in advice:
        head = f"{entry.severity:<8} {entry.subject:<{_LABEL - 1}}"
        lines += textwrap.wrap(
            entry.text,
            WIDTH,
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_on_hyphens=False,
        )
    return lines


def verdict(advice: Sequence[Advice], *, nodes: int) -> str:
    """The last line: whether a job can start here."""
    counts = {s: sum(entry.severity is s for entry in advice) for s in Severity}
    told = [counted(counts[s], s.value) for s in Severity if counts[s]]
    where = "this node" if nodes == 1 else f"these {nodes} nodes"
    end = "NOT READY: mend the problems first" if counts[Severity.PROBLEM] else "ready"
    return f"{where}: {', '.join(told) or 'nothing to mend'}; {end}"


def _block(label: str, rows: Sequence[str]) -> list[str]:
    """Rows under a label, wrapped; empty without rows."""
    lines: list[str] = []
    for row in rows:
        head = f"{'' if lines else label:<{_LABEL}}"
        wrapped = textwrap.wrap(
            row,
            WIDTH,
            initial_indent=head,
            subsequent_indent=" " * (_LABEL + 2),
            break_on_hyphens=False,
            drop_whitespace=False,
        )
        lines += [line.rstrip() for line in wrapped]
    return lines


def _software(facts: NodeFacts) -> str:
    s = facts.software
    parts = [
        f"Python {s.python}",
        f"PyTorch {s.torch} ({s.torch_build})",
        *(f"{name} {value}" for name, value in (("CUDA", s.cuda), ("ROCm", s.rocm)) if value),
        *([s.collectives] if s.collectives else []),
        f"megatron-core {s.megatron_core or 'missing'}",
        f"hetero-megatron {s.project}",
    ]
    return ", ".join(parts)


def _host(host: HostFacts) -> str:
    parts = [
        host.processor,
        counted(host.cores, "core"),
        counted(host.numa_nodes, "NUMA node"),
        size_text(host.memory),
        f"kernel {host.kernel}",
        f"governor {', '.join(host.governors) or 'not shown'}",
        f"IOMMU {', '.join(host.iommu_types) or 'off'}",
        *(["virtual machine"] if host.virtual_machine else []),
    ]
    return ", ".join(parts)


def _limits(host: HostFacts) -> str:
    limits = host.limits
    locked = "unlimited" if limits.locked_memory is None else size_text(limits.locked_memory)
    files = "unlimited" if limits.open_files is None else str(limits.open_files)
    return (
        f"locked memory {locked}, open files {files}, "
        f"/dev/shm {size_text(limits.shared_memory_free)} free of {size_text(limits.shared_memory)}"
    )


def _gpus(facts: NodeFacts, copies: Sequence[CopyResult]) -> list[str]:
    if not facts.gpus.usable:
        return [f"none that PyTorch can use (driver: {facts.gpus.driver or 'none'})"]
    rates = {copy.gpu: f"{copy.to_host:.1f} / {copy.to_gpu:.1f}" for copy in copies}
    rows = [("", "name", "memory", "PCIe", "link", "NUMA", "to / from host GB/s")]
    for gpu in facts.gpus.usable:
        rows.append(
            (
                str(gpu.index),
                gpu.name,
                size_text(gpu.memory),
                gpu.pci.address if gpu.pci else "unknown",
                str(gpu.link),
                _numa(gpu.pci.numa_node if gpu.pci else None),
                rates.get(gpu.index, "not measured"),
            )
        )
    return [f"{facts.gpus.vendor}, driver {facts.gpus.driver or 'unknown'}", *aligned(rows)]


def _interfaces(facts: NodeFacts) -> list[str]:
    rows = [("name", "state", "Gb/s", "MTU", "NUMA", "addresses")]
    for interface in facts.interfaces:
        if interface.kind != "physical" and not interface.addresses:
            continue
        rows.append(
            (
                interface.name,
                interface.state,
                f"{interface.speed / 1000:g}" if interface.speed else "-",
                str(interface.mtu or "-"),
                _numa(interface.pci.numa_node if interface.pci else None),
                ", ".join(interface.addresses) or "-",
            )
        )
    return aligned(rows)


def _rdma(facts: NodeFacts) -> list[str]:
    if not facts.rdma:
        return ["no devices"]
    rows = [("device", "port", "state", "layer", "Gb/s", "packet", "NIC", "firmware", "RoCE v2")]
    for device in facts.rdma:
        for port in device.ports:
            addresses = ", ".join(a for a in port.roce_addresses if "." in a)
            rows.append(
                (
                    device.name,
                    str(port.number),
                    port.state,
                    port.link_layer,
                    f"{port.rate:g}",
                    str(port.packet_bytes or "-"),
                    port.interface or "-",
                    device.firmware,
                    addresses or "-",
                )
            )
    return aligned(rows)


def _gpudirect(direct: GpuDirectFacts) -> str:
    said = {True: "yes", False: "no", None: "unknown"}
    options = [
        f"{name.removeprefix('CONFIG_')} {said[value]}"
        for name, value in direct.kernel_options.items()
    ]
    redirect = "yes" if direct.redirecting_ports else "unknown" if direct.unread_ports else "no"
    release = f"rdma-core {direct.libibverbs.release}".strip()
    return ", ".join(
        [
            f"peer-memory module {', '.join(direct.peer_modules) or 'none'}",
            *options,
            f"libibverbs {release if direct.libibverbs.usable else 'missing'}",
            f"{counted(len(direct.verbs_files), 'uverbs file')}",
            f"ACS redirects: {redirect}",
        ]
    )


def _rails(facts: NodeFacts) -> list[str]:
    if not facts.recommended_nics:
        return ["no NIC fit for training"]
    rows = [
        f"GPU {rail.gpu} - {rail.nic.name}{f' ({rail.nic.rdma})' if rail.nic.rdma else ''}: "
        f"{rail.distance}"
        for rail in facts.rails
    ]
    return [*rows, "--hetero-nics " + " ".join(facts.recommended_nics)]


def _paths(ways: Sequence[tuple[str, PathResult]]) -> list[str]:
    rows = [("between", "path", "4 KiB us", "there GB/s", "back GB/s", "both at once")]
    notes: dict[str, list[str]] = {}
    for between, result in ways:
        if result.error:
            notes.setdefault(f"{result.path} failed: {result.error}", []).append(between)
            continue
        rows.append(
            (
                between,
                result.path,
                f"{result.latency_us:.0f}",
                f"{result.there_gb_s:.2f}",
                f"{result.back_gb_s:.2f}",
                f"{result.both_gb_s:.2f}",
            )
        )
        if result.remark:
            notes.setdefault(f"auto passed over {result.remark}", []).append(between)
    return [*aligned(rows), *(f"{', '.join(who)}: {what}" for what, who in notes.items())]


def _numa(node: int | None) -> str:
    return "-" if node is None else str(node)


_REMARK = """\
# By hetero preflight --write-cluster. Links are as measured; where nothing was, the planner takes
# the accelerator's usual NIC.
"""
_UNKNOWN = """\
# Not built in: {names}. Give each what it lacks of memory, tflops, memory_bandwidth, link and nic
# (docs/planner.md).
"""
_SIMULATED = """\
# {settings} has training simulate a vendor; these are the nodes themselves.
"""


def cluster_text(report: Report) -> str:
    """The YAML of a cluster file: nodes by kind, rails between them as they were measured."""
    kinds: dict[str, list[NodeReport]] = {}
    for node in report.nodes:
        kinds.setdefault(_kind(node), []).append(node)
    unknown: dict[str, dict[str, Any]] = {}
    for nodes in kinds.values():
        if match_driver_name(_device(nodes[0])) is None:
            unknown[_accelerator(nodes[0])] = _described(nodes[0])
    data: dict[str, Any] = {"accelerators": unknown} if unknown else {}
    data["nodes"] = [_entry(name, nodes, report.paths) for name, nodes in kinds.items()]
    names = list(kinds)
    links = [
        {"between": [one, other], **found}
        for index, one in enumerate(names)
        for other in names[index + 1 :]
        if (found := _rail(kinds[one], kinds[other], report.paths))
    ]
    if links:
        data["links"] = links
    remark = _REMARK
    if unknown:
        remark += _UNKNOWN.format(names=", ".join(unknown))
    if report.emulated:
        remark += "# Emulated: every process played a node.\n"
    if played := sorted({node.facts["gpus"]["simulated_by"] for node in report.nodes} - {""}):
        remark += _SIMULATED.format(settings=", ".join(played))
    return remark + yaml.safe_dump(data, sort_keys=False)


def _device(node: NodeReport) -> str:
    return node.card.gpus[0] if node.card.gpus else "cpu"


def _accelerator(node: NodeReport) -> str:
    return match_driver_name(_device(node)) or _device(node)


def _kind(node: NodeReport) -> str:
    """Equal nodes have equal names."""
    count = max(len(node.card.gpus), 1)
    return f"{node.card.vendor}-{_accelerator(node)}-x{count}".replace(" ", "-")


def _described(node: NodeReport) -> dict[str, Any]:
    usable: Sequence[Mapping[str, Any]] = node.facts["gpus"]["usable"]
    known: dict[str, Any] = {"vendor": node.card.vendor}
    if usable:
        known["memory"] = round(usable[0]["memory"] / 2**30, 1)
    return known


def _entry(name: str, nodes: Sequence[NodeReport], paths: Sequence[PathResult]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": name,
        "accelerator": _accelerator(nodes[0]),
        "nodes": len(nodes),
        "gpus_per_node": max(len(nodes[0].card.gpus), 1),
    }
    if rails := len(nodes[0].card.addresses):
        entry["rails"] = rails
    addresses = [next(iter(node.card.addresses.values()), "127.0.0.1") for node in nodes]
    if not any(map(is_loopback, addresses)):
        entry["addresses"] = addresses
    return entry | _rail(nodes, nodes, paths)


def _rail(
    ones: Sequence[NodeReport], others: Sequence[NodeReport], paths: Sequence[PathResult]
) -> dict[str, float]:
    """One rail's bandwidth and latency: those of the slowest pair over the way that it would take.

    A path of several rails is divided by their number. Empty where no pair was measured.
    """
    ends = {node.card.number for node in ones}, {node.card.number for node in others}
    measured = [
        pair
        for pair in paths
        if not pair.error
        and pair.path.startswith("auto")
        and (
            (pair.source in ends[0] and pair.target in ends[1])
            or (pair.target in ends[0] and pair.source in ends[1])
        )
    ]
    if not measured:
        return {}
    slowest = min(measured, key=lambda pair: pair.one_way_gb_s)
    rails = min(len(node.card.addresses) or 1 for node in (*ones, *others))
    figures = slowest.rail_figures(rails=rails)
    return {key: round(figure, 3) for key, figure in figures.items()}
