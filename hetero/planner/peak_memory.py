"""Memory of one rank at its peak: what it trains, and the activations it has in flight.

After Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv 2205.05198), sections 4 and 5: under 1F1B the first stage holds the activations of as many
micro-batches as there are stages, the last of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero.planner.layer_profile import PartCosts
from hetero.planner.model_shape import ModelShape
from hetero.planner.stage_shape import StageShape
from hetero.planner.training_options import TrainingOptions


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank of a stage at their most."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    reserved: float

    @property
    def peak(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.reserved


def in_flight(stage: int, *, stages: int, micro_batches: int, chunks: int = 1) -> int:
    """Most passes through a chunk whose activations a stage holds at once."""
    ahead = stages - stage - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * stages
    return min(ahead + 1, micro_batches * chunks)


def rank_memory(
    stage: StageShape,
    *,
    passes: int,
    costs: PartCosts,
    model: ModelShape,
    options: TrainingOptions,
    replicas: int,
) -> RankMemory:
    """Of one of a stage's ranks, with the activations of `passes` passes in flight.

    `replicas` hold the stage, and share the optimizer's state where it is distributed.
    """
    parameters = stage.parameters(model)
    shards = replicas if stage.distributed_optimizer else 1
    activations = passes * max(stage.layers) * costs.layer_activation_bytes
    activations += costs.working_bytes(embedding=stage.has_embedding, head=stage.has_head)
    if stage.has_head:
        activations += costs.head_activation_bytes
    if options.delay_weight_gradients:
        activations = max(activations, _with_delayed(stage, passes, costs))
    if stage.has_embedding:
        activations += passes / len(stage.layers) * costs.embedding_activation_bytes
    return RankMemory(
        weights=parameters * options.parameter_bytes,
        gradients=parameters * options.gradient_bytes,
        optimizer=parameters * options.state_bytes / shards,
        activations=activations,
        reserved=options.reserved_bytes,
    )


def _with_delayed(stage: StageShape, passes: int, costs: PartCosts) -> float:
    """Activations when the oldest micro-batch's backward pass has come to the stage's first layer.

    Of the layers behind it there is what their weight gradients will be computed from.
    """
    layers = max(stage.layers)
    held = ((passes - 1) * layers + 1) * costs.layer_activation_bytes + costs.layer_working_bytes
    held += (layers - 1) * costs.layer_delayed_bytes
    return held + (costs.head_delayed_bytes if stage.has_head else 0.0)
