"""The report as text, at most a hundred columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from hetero.text import counted, size_text
from hetero.tools.preflight_checks.advice import Advice, Severity
from hetero.tools.preflight_checks.cluster_advice import NodeCard, PairResult
from hetero.tools.preflight_checks.gpudirect import GpuDirectFacts
from hetero.tools.preflight_checks.host_facts import HostFacts
from hetero.tools.preflight_checks.node_facts import NodeFacts
from hetero.tools.preflight_checks.path_bandwidth import CopyResult, PathResult
from hetero.tools.preflight_checks.reach import Call

WIDTH = 98
_LABEL = 12
_NODE_HEAD = ("", "host", "vendor", "GPUs", "driver", "PyTorch", "collectives")


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
    cards: Sequence[NodeCard], calls: Sequence[Call], paths: Sequence[PairResult]
) -> list[str]:
    """What was tried between the nodes."""
    ways = [(f"{pair.source} - {pair.target}", pair.result) for pair in paths]
    return [
        *_block("nodes", _table([_NODE_HEAD, *map(_node_row, cards)])),
        *(_block("ports", _table(_port_rows(calls))) if calls else []),
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


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


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
    return [f"{facts.gpus.vendor}, driver {facts.gpus.driver or 'unknown'}", *_table(rows)]


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
    return _table(rows)


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
    return _table(rows)


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
    return [*_table(rows), *(f"{', '.join(who)}: {what}" for what, who in notes.items())]


def _numa(node: int | None) -> str:
    return "-" if node is None else str(node)
