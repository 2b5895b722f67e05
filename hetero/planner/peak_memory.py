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
    expert_copies: int,
    bf16: PartCosts | None = None,
) -> RankMemory:
    """Peak memory of a rank with the activations of `passes` forward passes in flight.

    `bf16` are the costs of its layers that stay in bf16, where others are in fp8. A distributed
    optimizer shards its state over `copies` copies of the weights, or of experts.
    """
    shared, experts = stage.shared_parameters(model), stage.expert_parameters(model)
    parameters = shared + experts
    shards = copies if stage.distributed_optimizer else 1
    optimizer = shared * options.state_bytes / shards
    if experts:
        expert_shards = expert_copies if stage.distributed_optimizer else 1
        optimizer += experts * options.state_bytes / expert_shards
    dense, sparse = _largest_chunk(stage, costs)
    activations = passes * dense * costs.layer_activation_bytes
    activations += passes * sparse * costs.sparse_layer_activation_bytes
    activations += _working_bytes(stage, costs)
    if stage.has_head:
        activations += costs.head_activation_bytes
    if options.delay_weight_gradients and not stage.has_embedding:
        activations = max(activations, _delayed_activation_bytes(stage, passes, costs))
    if stage.has_embedding:
        activations += passes / len(stage.layers) * costs.embedding_activation_bytes
    if bf16 is not None:
        activations += passes * _more_in_bf16(stage, costs, bf16)
    return RankMemory(
        weights=parameters * options.parameter_bytes + stage.fp8_weight_bytes(model),
        gradients=parameters * options.gradient_bytes,
        optimizer=optimizer,
        activations=activations,
        reserved=options.reserved_bytes,
    )


def _delayed_activation_bytes(stage: StageShape, passes: int, costs: PartCosts) -> float:
    """Activations with delayed weight gradients, when a backward pass is at its last layer.

    The layers behind it keep what their weight gradients are computed from.
    """
    dense, sparse = _largest_chunk(stage, costs)
    if sparse:
        kept = (passes - 1) * dense * costs.layer_activation_bytes
        kept += ((passes - 1) * sparse + 1) * costs.sparse_layer_activation_bytes
        kept += costs.working_bytes(embedding=False, head=False, dense=dense > 0, sparse=True)
        kept += dense * costs.layer_delayed_bytes
        kept += (sparse - 1) * costs.sparse_layer_delayed_bytes
    else:
        kept = ((passes - 1) * dense + 1) * costs.layer_activation_bytes
        kept += costs.layer_working_bytes
        kept += (dense - 1) * costs.layer_delayed_bytes
    return kept + (costs.head_delayed_bytes if stage.has_head else 0.0)


def _largest_chunk(stage: StageShape, costs: PartCosts) -> tuple[int, int]:
    """The dense and the sparse layers of the model chunk that keeps most."""
    if not stage.sparse_layers:
        return max(stage.layers), 0

    def kept(chunk: tuple[int, int]) -> float:
        dense, sparse = chunk
        dense_bytes = dense * costs.layer_activation_bytes
        return dense_bytes + sparse * costs.sparse_layer_activation_bytes

    return max(stage.dense_and_sparse(), key=kept)


def _more_in_bf16(stage: StageShape, costs: PartCosts, bf16: PartCosts) -> float:
    """Bytes that a chunk keeps of one pass beyond those of fp8, because some layers are in bf16."""
    dense = bf16.layer_activation_bytes - costs.layer_activation_bytes
    sparse = bf16.sparse_layer_activation_bytes - costs.sparse_layer_activation_bytes
    return max(own * dense + others * sparse for own, others in stage.bf16_layers)


def _working_bytes(stage: StageShape, costs: PartCosts) -> float:
    sparse = sum(stage.sparse_layers)
    return costs.working_bytes(
        embedding=stage.has_embedding,
        head=stage.has_head,
        dense=sparse < sum(stage.layers),
        sparse=sparse > 0,
    )
