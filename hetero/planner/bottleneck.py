"""What bounds a plan's step, in sentences for users."""

from __future__ import annotations

import numpy as np

from hetero.planner.search import Candidate
from hetero.planner.search_space import Problem
from hetero.planner.solution import SimulatedPlan
from hetero.text import counted


def explain_bottleneck(problem: Problem, plan: SimulatedPlan) -> list[str]:
    """Sentences for users: the bottleneck of a step, its phases, memory, idle GPUs."""
    candidate = plan.candidate
    split, placement = candidate.split, plan.placement
    lines = []
    if candidate.shares:
        lines.append(_slowest_replicas_sentence(plan))
    else:
        lines.append(_bottleneck_sentence(problem, candidate))
        steady = candidate.micro_batches * split.period
        fill_and_drain = max(split.seconds - split.update_seconds - steady, 0.0)
        lines.append(
            f"Of the estimated step, {steady / split.seconds:.0%} is "
            f"{counted(candidate.micro_batches, 'micro-batch', 'micro-batches')} one after "
            f"another, {fill_and_drain / split.seconds:.0%} filling and emptying the pipeline, "
            f"{split.update_seconds / split.seconds:.0%} reducing gradients and updating."
        )
    fullest = max(plan.prediction.stages, key=lambda stage: stage.peak_bytes / stage.limit_bytes)
    lines.append(
        f"Memory is fullest on stage {fullest.stage} ({fullest.kind}): "
        f"{fullest.peak_bytes / 2**30:.1f} of {fullest.limit_bytes / 2**30:.1f} GiB."
    )
    used: dict[str, int] = {}
    for name, mesh in zip(placement.kinds, placement.plan.meshes, strict=True):
        used[name] = used.get(name, 0) + mesh.world_size
    for kind in problem.cluster.kinds:
        if (idle := kind.gpus - used.get(kind.name, 0)) > 0:
            lines.append(f"{idle} of {kind.gpus} GPUs of {kind.name} are not used.")
    return lines


def _slowest_replicas_sentence(plan: SimulatedPlan) -> str:
    ends = [timeline.seconds for timeline in plan.prediction.timelines]
    slowest = ends.index(max(ends))
    reduction = 1 - max(ends) / plan.seconds
    return (
        f"The replicas on {plan.placement.kinds[slowest]} bound it: they end last, and the first "
        f"to end wait for {1 - min(ends) / max(ends):.1%} of that time. Reducing gradients "
        f"afterwards takes {reduction:.0%} of the step."
    )


def _bottleneck_sentence(problem: Problem, candidate: Candidate) -> str:
    pipeline = candidate.pipeline(problem)
    times = pipeline.layer_seconds * np.array(candidate.split.layers) + pipeline.extra_seconds
    period = candidate.split.period
    slowest = int(times.argmax())
    names = [mesh.shape.kind.name for mesh in candidate.meshes for _ in range(mesh.stages)]
    if times[slowest] >= period * (1 - 1e-6):
        return (
            f"Stage {slowest} ({names[slowest]}) bounds it: it computes for all of the "
            f"{period:.3g} s from one micro-batch to the next."
        )
    link = int(pipeline.link_seconds.argmax())
    if candidate.chunks * pipeline.link_seconds[link] >= period * (1 - 1e-6):
        return (
            f"The link from stage {link} to {link + 1} ({names[link]} to {names[link + 1]}) bounds "
            f"it: for each micro-batch it, or a NIC that it uses, is busy for {period:.3g} s, and "
            f"no stage computes for longer than {times[slowest]:.3g} s."
        )
    return (
        f"Transfers bound it: a stage computes for at most {times[slowest]:.3g} s, but the "
        f"micro-batches that may be in flight come back only every {period:.3g} s."
    )
