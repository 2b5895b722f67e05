"""Estimated peak memory of a plan's ranks, without a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.plan import Plan
from hetero.planner.accelerators import built_in_accelerators
from hetero.planner.analytic_profile import AnalyticProfile
from hetero.planner.layer_profile import PartCosts
from hetero.planner.model_shape import ModelShape
from hetero.planner.peak_memory import RankMemory, in_flight, rank_memory
from hetero.planner.stage_costs import memory_costs
from hetero.planner.stage_shape import StageShape
from hetero.planner.training_options import TrainingOptions


@dataclass(frozen=True)
class StageMemory:
    """Parameters and peak memory of each rank of a stage."""

    parameters: float
    memory: RankMemory
    micro_batches: float
    """In flight at the peak; a pass through one of n chunks counts as 1/n."""

    @property
    def states(self) -> float:
        return self.memory.weights + self.memory.gradients + self.memory.optimizer


def stage_memory(
    plan: Plan, stage: int, model: ModelShape, *, micro_batches: int, options: TrainingOptions
) -> StageMemory:
    """The estimate for a stage of a resolved plan (`Plan.resolved`)."""
    mesh = plan.meshes[plan.blocks_of_stage(stage)[0].mesh]
    shape = StageShape.of(plan, mesh, stage, model=model, kind=mesh.vendor, fp8=options.fp8)
    passes = in_flight(stage, stages=plan.stages, micro_batches=micro_batches, chunks=plan.chunks)
    # Only bytes are used. They depend on the accelerator in one thing: this one has experts in fp8,
    # as `shape` has, which take more.
    known = built_in_accelerators().values()
    accelerator = next(part for part in known if part.has_fp8_grouped_mm)
    profile = AnalyticProfile(
        model, {accelerator.name: accelerator}, element_bytes=options.activation_bytes
    )

    def costs_of(one: StageShape) -> PartCosts:
        return memory_costs(accelerator.name, one, model=model, profile=profile, options=options)

    memory = rank_memory(
        shape,
        passes=passes,
        costs=costs_of(shape),
        bf16=costs_of(shape.in_bf16()) if shape.bf16_layers else None,
        model=model,
        options=options,
        copies=mesh.copies,
        expert_copies=plan.expert_copies(stage),
    )
    return StageMemory(
        parameters=shape.parameters(model),
        memory=memory,
        micro_batches=passes / plan.chunks,
    )
