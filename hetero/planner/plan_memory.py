"""What a rank of a plan holds, for a plan that no cluster has been named for yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetero.plan import Plan
from hetero.planner.accelerators import built_in
from hetero.planner.analytic_profile import AnalyticProfile
from hetero.planner.model_shape import ModelShape
from hetero.planner.peak_memory import RankMemory, in_flight, rank_memory
from hetero.planner.stage_shape import StageShape
from hetero.planner.training_options import TrainingOptions

_PROFILED_BYTES = 2
"""Of an activation's element, in the analytic profile."""


@dataclass(frozen=True)
class StageMemory:
    """Of each rank of a stage."""

    parameters: float
    held: RankMemory
    micro_batches: float
    """In flight at the peak; the passes of an interleaved stage count by their part of it."""

    @property
    def states(self) -> float:
        return self.held.weights + self.held.gradients + self.held.optimizer


def stage_memory(
    plan: Plan, stage: int, model: ModelShape, *, micro_batches: int, options: TrainingOptions
) -> StageMemory:
    """The estimate for a stage of a plan whose options are settled, see `Plan.settled`."""
    mesh = plan.meshes[plan.blocks_of_stage(stage)[0].mesh]
    shape = StageShape.of(plan, mesh, stage, kind=mesh.vendor)
    passes = in_flight(stage, stages=plan.stages, micro_batches=micro_batches, chunks=plan.chunks)
    # Times depend on the accelerator, and bytes do not.
    part = next(iter(built_in().values()))
    profile = AnalyticProfile(model, {part.name: part})
    held = rank_memory(
        shape,
        passes=passes,
        costs=profile.costs(part.name, shape.point(model)),
        model=model,
        options=options,
        replicas=mesh.data,
    )
    scale = options.activation_bytes / _PROFILED_BYTES
    return StageMemory(
        parameters=shape.parameters(model),
        held=replace(held, activations=held.activations * scale),
        micro_batches=passes / plan.chunks,
    )
