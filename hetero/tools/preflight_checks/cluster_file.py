"""The nodes that were checked together as a cluster file for hetero plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from hetero.planner.accelerators import match_driver_name
from hetero.startup.addresses import is_loopback
from hetero.tools.preflight_checks.cluster_advice import PairResult
from hetero.tools.preflight_checks.readiness import NodeReport, Report

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


def _entry(name: str, nodes: Sequence[NodeReport], paths: Sequence[PairResult]) -> dict[str, Any]:
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
    ones: Sequence[NodeReport], others: Sequence[NodeReport], paths: Sequence[PairResult]
) -> dict[str, float]:
    """One rail's bandwidth and latency: those of the slowest pair over the way that it would take.

    A path of several rails is divided by their number. Empty where no pair was measured.
    """
    ends = {node.card.number for node in ones}, {node.card.number for node in others}
    measured = [
        pair
        for pair in paths
        if not pair.result.error
        and pair.result.path.startswith("auto")
        and (
            (pair.source in ends[0] and pair.target in ends[1])
            or (pair.target in ends[0] and pair.source in ends[1])
        )
    ]
    if not measured:
        return {}
    slowest = min(measured, key=lambda pair: min(pair.result.there_gb_s, pair.result.back_gb_s))
    rails = min(len(node.card.addresses) or 1 for node in (*ones, *others))
    figures = slowest.result.rail_figures(rails=rails)
    return {key: round(figure, 3) for key, figure in figures.items()}
