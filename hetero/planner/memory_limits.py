"""Whether a plan's stages fit into their GPUs, and what would make those fit that do not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetero.formatting import counted, size_text
from hetero.plan import Mesh, Plan, split_over_chunks
from hetero.planner.model_shape import ModelShape
from hetero.planner.plan_memory import stage_memory
from hetero.planner.training_options import TrainingOptions


def memory_problems(
    plan: Plan,
    model: ModelShape,
    memory: Mapping[str, float],
    *,
    micro_batches: int,
    options: TrainingOptions,
) -> Iterator[str]:
    """A sentence for each mesh with stages whose estimate is above its vendor's bytes of a GPU.

    The plan's options are settled. Vendors that `memory` does not name are not looked at.
    """

    def needs(changed: Plan, stages: Sequence[int]) -> list[float]:
        return [
            stage_memory(
                changed, stage, model, micro_batches=micro_batches, options=options
            ).held.peak
            for stage in stages
        ]

    for index, mesh in enumerate(plan.meshes):
        limit = memory.get(mesh.vendor, math.inf)
        stages = [block.stage for block in plan.blocks if block.mesh == index]
        stages = [s for s, held in zip(stages, needs(plan, stages), strict=True) if held > limit]
        if not stages:
            continue
        for words, changed in _smaller(plan, index, stages):
            needed = needs(changed, stages)
            if max(needed) <= limit:
                remedy = f"with {words} it is {_sizes(needed)}"
                break
        else:
            remedy = "give the mesh smaller micro-batches or more tensor-parallel ranks"
        yield (
            f"mesh {index} ({mesh.vendor}) needs an estimated {_sizes(needs(plan, stages))} a rank "
            f"on stage {', '.join(map(str, stages))} and a GPU has {size_text(limit)}; {remedy}"
        )


def _sizes(found: Sequence[float]) -> str:
    return ", ".join(map(size_text, found))


def _smaller(plan: Plan, index: int, stages: Sequence[int]) -> Iterator[tuple[str, Plan]]:
    """Plans that hold less on these stages of a mesh: other options first, then fewer layers."""
    others, least, words = plan.meshes[:index], plan.meshes[index], ""
    for words, least in _changes(plan.meshes[index]):
        yield words, replace(plan, meshes=(*others, least, *plan.meshes[index + 1 :]))
    smallest = replace(plan, meshes=(*others, least, *plan.meshes[index + 1 :]))
    for count in range(max(sum(plan.layers[stage]) for stage in stages) - 1, 0, -1):
        layers = [list(chunks) for chunks in plan.layers]
        for stage in stages:
            layers[stage] = list(split_over_chunks(min(count, sum(layers[stage])), plan.chunks))
        fewer = f"at most {counted(count, 'layer')} on a stage"
        yield (
            ", ".join(filter(None, (words, fewer))),
            replace(smallest, layers=tuple(map(tuple, layers))),
        )


def _changes(mesh: Mesh) -> Iterator[tuple[str, Mesh]]:
    """What would save memory without another rank, the cheapest first, then all of it together."""
    saving: dict[str, Any] = {}
    if mesh.tensor > 1 and not mesh.sequence_parallel:
        saving["sequence_parallel"] = True
    if mesh.data > 1 and not mesh.distributed_optimizer:
        saving["distributed_optimizer"] = True
    if mesh.recompute != "full":
        saving["recompute"] = "full"
    for name, value in saving.items():
        yield _words({name: value}), replace(mesh, **{name: value})
    if len(saving) > 1:
        yield _words(saving), replace(mesh, **saving)


def _words(saving: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {str(value).lower()}" for name, value in saving.items())
