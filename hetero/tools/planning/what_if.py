"""Sensitivity analysis: best plans on other clusters, and other splits of the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hetero.planner.layer_split import PipelineModel, estimate
from hetero.planner.search import Candidate
from hetero.planner.search_space import Problem, pipeline_model
from hetero.planner.solution import (
    SimulatedPlan,
    Solution,
    best_throughput,
    simulate_candidate,
    with_nodes,
    with_scaled_links,
    with_slowdown,
)

SWEEPS = ("nodes", "link", "slower", "split")
_LINK_FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
_SLOWER_FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
_NODE_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ReferenceLine:
    """A horizontal line to compare with."""

    name: str
    value: float


@dataclass(frozen=True)
class Sweep:
    """One plot: a figure over the parameter that is varied."""

    title: str
    caption: str
    x_label: str
    y_label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    """0 where nothing fits."""
    levels: tuple[ReferenceLine, ...] = ()
    log_x: bool = False
    not_fitting: tuple[float, ...] = ()
    """Those of `x` that are computed although they do not fit into memory."""


def sweep(name: str, problem: Problem, found: Solution, *, progress: Progress) -> list[Sweep]:
    """The plots of one of SWEEPS; none where the question has no meaning for this cluster."""
    return list(_SWEEP_FUNCTIONS[name](problem, found, progress))


def _nodes(problem: Problem, found: Solution, progress: Progress) -> list[Sweep]:
    sweeps, one_more_node = [], dict(found.one_more_node)
    for kind in problem.cluster.kinds:
        several = len(problem.cluster.kinds) > 1
        counts = sorted({round(share * kind.nodes) for share in _NODE_SHARES} | {kind.nodes + 1})
        tokens: list[float] = []
        for count in counts if several else [count for count in counts if count]:
            progress(f"{count} nodes of {kind.name}")
            known = {kind.nodes: found.tokens_per_second, kind.nodes + 1: one_more_node[kind.name]}
            least = tokens[-1] if count > kind.nodes else 0.0
            changed = with_nodes(problem, kind, count)
            tokens.append(known.get(count) or best_throughput(changed, at_least=least))
        x = [float(count) for count in counts if several or count]
        sweeps.append(
            Sweep(
                title=f"Other numbers of nodes of {kind.name}",
                caption=f"The best plan for each number; today {kind.nodes}.",
                x_label=f"nodes of {kind.name}",
                y_label="tokens/s",
                x=tuple(x),
                y=tuple(tokens),
            )
        )
    return sweeps


def _link(problem: Problem, found: Solution, progress: Progress) -> list[Sweep]:
    if len(problem.cluster.kinds) < 2:
        return []
    tokens: list[float] = []
    for factor in _LINK_FACTORS:
        progress(f"links between kinds x {factor:g}")
        changed, least = with_scaled_links(problem, factor), tokens[-1] if factor > 1 else 0.0
        best = found.tokens_per_second if factor == 1 else best_throughput(changed, at_least=least)
        tokens.append(best)
    return [
        Sweep(
            title="Slower and faster links between kinds of nodes",
            caption="The best plan for each speed of every link from one kind to another.",
            x_label="bandwidth, times today's",
            y_label="tokens/s",
            x=_LINK_FACTORS,
            y=tuple(tokens),
            levels=_throughput_alone(found),
            log_x=True,
        )
    ]


def _slower(problem: Problem, found: Solution, progress: Progress) -> list[Sweep]:
    sweeps = []
    for vendor in dict.fromkeys(kind.vendor for kind in problem.cluster.kinds):
        tokens = []
        for factor in _SLOWER_FACTORS:
            progress(f"{vendor} {factor:g} times slower")
            changed = with_slowdown(problem, vendor, factor)
            tokens.append(found.tokens_per_second if factor == 1 else best_throughput(changed))
        sweeps.append(
            Sweep(
                title=f"{vendor} slower than its profile",
                caption="The best plan for each speed.",
                x_label=f"times that each layer takes on {vendor}",
                y_label="tokens/s",
                x=_SLOWER_FACTORS,
                y=tuple(tokens),
                levels=tuple(
                    line for line in _throughput_alone(found) if not line.name.startswith(vendor)
                ),
            )
        )
    return sweeps


def _throughput_alone(found: Solution) -> tuple[ReferenceLine, ...]:
    return tuple(
        ReferenceLine(f"{one.vendor} alone", one.tokens_per_second)
        for one in found.vendor_baselines
        if one.tokens_per_second
    )


def _split(problem: Problem, found: Solution, progress: Progress) -> list[Sweep]:
    """Step time over the layers that the first mesh takes, everything else as in the best plan."""
    planned = next(
        (
            one
            for one in found.best.plans
            if len(one.candidate.meshes) > 1 and not one.candidate.shares
        ),
        None,
    )
    if planned is None:
        return []
    candidate, layers = planned.candidate, problem.model.layers
    mesh = candidate.meshes[0]
    rest = sum(other.stages for other in candidate.meshes[1:])
    counts = range(mesh.stages * candidate.chunks, layers - rest * candidate.chunks + 1)
    progress("other splits of the layers")
    steps = [_simulate_split(problem, planned, count) for count in counts]
    name, vendor = mesh.shape.kind.name, mesh.shape.kind.vendor
    slowest = _slowest_alone(problem, found)
    worse = [
        count
        for count, step in zip(counts, steps, strict=True)
        if slowest and step.seconds > slowest.value
    ]
    caption = (
        "Every split for the shapes of the plan, simulated; stages of a mesh share its layers as "
        "their speed and memory asks for. Hollow: does not fit into memory."
    )
    if slowest and worse:
        caption += (
            f" A step is longer than on {slowest.name} with {_ranges(worse)} layers on {name}."
        )
    return [
        Sweep(
            title="Other splits of the layers",
            caption=caption,
            x_label=f"layers on {name} ({vendor}), of {layers}",
            y_label="seconds of a step",
            x=tuple(float(count) for count in counts),
            y=tuple(step.seconds for step in steps),
            levels=_seconds_alone(problem, found),
            not_fitting=tuple(
                float(count)
                for count, step in zip(counts, steps, strict=True)
                if not step.prediction.fits
            ),
        )
    ]


def _simulate_split(problem: Problem, planned: SimulatedPlan, first: int) -> SimulatedPlan:
    """Simulate the plan with `first` layers on its first mesh, within memory where that can be."""
    candidate = planned.candidate
    count = candidate.meshes[0].stages
    if sum(candidate.split.layers[:count]) == first:
        return planned
    pipeline = pipeline_model(
        problem,
        candidate.meshes,
        micro_batches=candidate.micro_batches,
        chunks=candidate.chunks,
    )
    layers = [
        *_balanced_layers(first, pipeline, slice(count)),
        *_balanced_layers(problem.model.layers - first, pipeline, slice(count, None)),
    ]
    split = estimate(pipeline, np.array(layers))
    return simulate_candidate(
        problem,
        Candidate(candidate.meshes, split, candidate.micro_batches, candidate.chunks),
    )


def _balanced_layers(layers: int, pipeline: PipelineModel, stages: slice) -> list[int]:
    """Greedy: each layer to the stage that then takes the least time, of those with room for it."""
    seconds, extra = pipeline.layer_seconds[stages], pipeline.extra_seconds[stages]
    counts = np.full(len(seconds), pipeline.chunks)
    for _ in range(layers - int(counts.sum())):
        is_full = counts >= pipeline.max_layers[stages]
        counts[np.lexsort(((counts + 1) * seconds + extra, is_full))[0]] += 1
    return [int(count) for count in counts]


def _seconds_alone(problem: Problem, found: Solution) -> tuple[ReferenceLine, ...]:
    tokens = problem.space.global_batch * problem.model.seq_length
    return tuple(
        ReferenceLine(f"{one.vendor} alone", tokens / one.tokens_per_second)
        for one in found.vendor_baselines
        if one.tokens_per_second
    )


def _slowest_alone(problem: Problem, found: Solution) -> ReferenceLine | None:
    return max(_seconds_alone(problem, found), key=lambda line: line.value, default=None)


def _ranges(counts: Sequence[int]) -> str:
    """`1 to 4 and 20 to 24`."""
    runs: list[list[int]] = []
    for count in counts:
        if runs and count == runs[-1][-1] + 1:
            runs[-1].append(count)
        else:
            runs.append([count])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return " and ".join(texts)


_SWEEP_FUNCTIONS = {"nodes": _nodes, "link": _link, "slower": _slower, "split": _split}
