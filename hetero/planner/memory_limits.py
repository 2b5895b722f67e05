"""Whether a plan fits into memory, and the cheapest change that would make it fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetero.plan import Mesh, Plan, split_over_chunks
from hetero.planner.model_shape import ModelShape
from hetero.planner.plan_memory import stage_memory
from hetero.planner.training_options import TrainingOptions
from hetero.text import counted, size_text


def memory_problems(
    plan: Plan,
    model: ModelShape,
    memory: Mapping[str, float],
    *,
    micro_batches: int,
    options: TrainingOptions,
) -> Iterator[str]:
    """An error sentence for each mesh with a stage that exceeds its vendor's bytes per GPU.

    `plan` must be resolved (`Plan.resolved`). Vendors missing in `memory` are not checked.
    """

    def peaks(changed: Plan, stages: Sequence[int]) -> list[float]:
        return [
            stage_memory(
                changed, stage, model, micro_batches=micro_batches, options=options
            ).memory.peak
            for stage in stages
        ]

    for index, mesh in enumerate(plan.meshes):
        capacity = memory.get(mesh.vendor, math.inf)
        stages = [block.stage for block in plan.blocks if block.mesh == index]
        stages = [s for s, peak in zip(stages, peaks(plan, stages), strict=True) if peak > capacity]
        if not stages:
            continue
        for change, changed in _smaller_plans(plan, index, stages):
            needed = peaks(changed, stages)
            if max(needed) <= capacity:
                remedy = f"with {change} it is {_sizes_text(needed)}"
                break
        else:
            remedy = "give the mesh smaller micro-batches or more tensor- or context-parallel ranks"
        needed_text = _sizes_text(peaks(plan, stages))
        yield (
            f"mesh {index} ({mesh.vendor}) needs an estimated {needed_text} a rank on stage "
            f"{', '.join(map(str, stages))} and a GPU has {size_text(capacity)}; {remedy}"
        )


def _sizes_text(sizes: Sequence[float]) -> str:
    return ", ".join(map(size_text, sizes))


def _smaller_plans(plan: Plan, index: int, stages: Sequence[int]) -> Iterator[tuple[str, Plan]]:
    """Plans that need less memory on these stages: first with other options, then fewer layers."""
    others, smallest_mesh, change = plan.meshes[:index], plan.meshes[index], ""
    for change, smallest_mesh in _memory_savings(plan.meshes[index]):
        yield change, replace(plan, meshes=(*others, smallest_mesh, *plan.meshes[index + 1 :]))
    smallest = replace(plan, meshes=(*others, smallest_mesh, *plan.meshes[index + 1 :]))
    for count in range(max(sum(plan.layers[stage]) for stage in stages) - 1, 0, -1):
        layers = [list(chunks) for chunks in plan.layers]
        for stage in stages:
            layers[stage] = list(split_over_chunks(min(count, sum(layers[stage])), plan.chunks))
        fewer = f"at most {counted(count, 'layer')} on a stage"
        yield (
            ", ".join(filter(None, (change, fewer))),
            replace(smallest, layers=tuple(map(tuple, layers))),
        )


def _memory_savings(mesh: Mesh) -> Iterator[tuple[str, Mesh]]:
    """Options that save memory without more ranks, cheapest first, then all combined."""
    saving: dict[str, Any] = {}
    if mesh.tensor > 1 and not mesh.sequence_parallel:
        saving["sequence_parallel"] = True
    if mesh.copies > 1 and not mesh.distributed_optimizer:
        saving["distributed_optimizer"] = True
    if mesh.recompute != "full":
        saving["recompute"] = "full"
    for name, value in saving.items():
        yield _options_text({name: value}), replace(mesh, **{name: value})
    if len(saving) > 1:
        yield _options_text(saving), replace(mesh, **saving)


def _options_text(saving: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {str(value).lower()}" for name, value in saving.items())
