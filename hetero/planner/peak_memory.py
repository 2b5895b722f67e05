"""Peak memory of a rank: weights, gradients, optimizer state, activations in flight.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198), sections 4 and 5: under 1F1B, stage s of p holds activations of p - s micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero.planner.layer_profile import PartCosts
from hetero.planner.model_shape import ModelShape
from hetero.planner.pipeline_schedule import warm_up_passes
from hetero.planner.stage_shape import StageShape
from hetero.planner.training_options import TrainingOptions


@dataclass(frozen=True)
class RankMemory:
    """Peak bytes of one rank of a stage."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    reserved: float

    @property
    def peak(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.reserved


def in_flight(stage: int, *, stages: int, micro_batches: int, chunks: int = 1) -> int:
    """Peak number of passes (each through one chunk) whose activations a stage holds."""
    warm_up = warm_up_passes(stage, stages=stages, chunks=chunks)
    return min(warm_up + 1, micro_batches * chunks)


def rank_memory(
    stage: StageShape,
    *,
    passes: int,
    costs: PartCosts,
    model: ModelShape,
    options: TrainingOptions,
    copies: int,
) -> RankMemory:
    """Peak memory of a rank with the activations of `passes` forward passes in flight.

    A distributed optimizer shards its state over so many `copies` of the weights.
    """
    parameters = stage.parameters(model)
    shards = copies if stage.distributed_optimizer else 1
    activations = passes * max(stage.layers) * costs.layer_activation_bytes
    activations += costs.working_bytes(embedding=stage.has_embedding, head=stage.has_head)
    if stage.has_head:
        activations += costs.head_activation_bytes
    if options.delay_weight_gradients and not stage.has_embedding:
        activations = max(activations, _delayed_activation_bytes(stage, passes, costs))
    if stage.has_embedding:
        activations += passes / len(stage.layers) * costs.embedding_activation_bytes
    return RankMemory(
        weights=parameters * options.parameter_bytes,
        gradients=parameters * options.gradient_bytes,
        optimizer=parameters * options.state_bytes / shards,
        activations=activations,
        reserved=options.reserved_bytes,
    )


def _delayed_activation_bytes(stage: StageShape, passes: int, costs: PartCosts) -> float:
    """Activations with delayed weight gradients, when a backward pass is at its last layer.

    The layers behind it keep what their weight gradients are computed from.
    """
    layers = max(stage.layers)
    kept = ((passes - 1) * layers + 1) * costs.layer_activation_bytes + costs.layer_working_bytes
    kept += (layers - 1) * costs.layer_delayed_bytes
    return kept + (costs.head_delayed_bytes if stage.has_head else 0.0)
