"""What a rank of a plan holds, estimated without measuring: parameters, states and activations.

Activations follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (arXiv 2205.05198, sections 4 and 5), by the widths of the model at hand, for attention
kernels that keep no matrix of scores. Dropout's masks are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero.plan import Mesh, Plan
from hetero.planner.model_shape import ModelShape
from hetero.planner.training_options import TrainingOptions

# Of the scores: the softmax and its dropout in the activations' type, and a mask of one byte.
_SCORES_KEPT, _MASK_BYTES = 2, 1
_LOSS_BYTES = 4
_KEEP_SCORES = ("unfused", "local")


@dataclass(frozen=True)
class RankMemory:
    """Of each rank of one stage, in bytes but for the parameters."""

    parameters: int
    states: float
    """Weights, gradients and the optimizer's state."""
    activations: float
    """Of the micro-batches in flight, at their peak."""
    in_flight: float
    """Micro-batches whose activations the stage holds at once; a chunk's count for its part."""
    reserved: float

    @property
    def total(self) -> float:
        return self.states + self.activations + self.reserved


def rank_memory(
    plan: Plan, stage: int, model: ModelShape, *, micro_batches: int, options: TrainingOptions
) -> RankMemory:
    """The estimate for a stage of a plan whose options are settled, see `Plan.settled`."""
    mesh = plan.meshes[plan.blocks_of_stage(stage)[0].mesh]
    layers = sum(plan.layers[stage])
    parameters = parameters_of_rank(plan, stage, model)
    shared = mesh.data if mesh.distributed_optimizer else 1
    states = parameters * (options.parameter_bytes + options.gradient_bytes)
    in_flight = passes_in_flight(plan, stage, micro_batches) / plan.chunks
    kept = layers * layer_activation_bytes(model, mesh, options=options)
    # One layer at a time is computed again, and one micro-batch at a time has a loss.
    working = 0.0
    if mesh.recompute != "none" and layers:
        working = layer_activation_bytes(model, mesh, options=options, recompute="none")
    if stage == plan.stages - 1:
        working += head_activation_bytes(model, mesh, options=options)
    return RankMemory(
        parameters=parameters,
        states=states + parameters * options.state_bytes / shared,
        activations=in_flight * kept + working,
        in_flight=in_flight,
        reserved=options.reserved_bytes,
    )


def parameters_of_rank(plan: Plan, stage: int, model: ModelShape) -> int:
    """Those of one tensor-parallel rank: its parts of what is split, and all that is not."""
    tensor = plan.meshes[plan.blocks_of_stage(stage)[0].mesh].tensor
    split = model.layer_matrix_parameters
    if model.linear_bias:
        split += (model.mlp_matrices - 1) * model.ffn
    if model.linear_bias or model.qkv_bias:
        split += model.attention_width + 2 * model.key_value_width
    vocabulary = model.vocabulary * model.hidden // tensor
    count = sum(plan.layers[stage]) * (split // tensor + model.layer_parameters - split)
    if stage == 0:
        count += vocabulary + model.learned_positions * model.hidden
    if stage == plan.stages - 1:
        is_copy = model.tied and plan.stages == 1
        count += model.norm_weights * model.hidden + (0 if is_copy else vocabulary)
    return count


def passes_in_flight(plan: Plan, stage: int, micro_batches: int) -> int:
    """Forward passes of a model chunk whose backward pass is still to come, at their most.

    1F1B holds one for each stage from here to the end; interleaved, megatron-core runs twice as
    far ahead and through all but one of the chunks.
    """
    ahead = plan.stages - 1 - stage
    if plan.chunks > 1:
        ahead = 2 * ahead + (plan.chunks - 1) * plan.stages
    return min(ahead + 1, micro_batches * plan.chunks)


def layer_activation_bytes(
    model: ModelShape, mesh: Mesh, *, options: TrainingOptions, recompute: str | None = None
) -> float:
    """What one layer keeps of one micro-batch on one rank, from its forward to its backward pass.

    `recompute` is the mesh's where it is left out.
    """
    tokens = model.seq_length * (mesh.micro_batch_size or 1)
    unsplit = tokens * options.activation_bytes / (mesh.tensor if mesh.sequence_parallel else 1)
    recompute = recompute or mesh.recompute or "none"
    if recompute == "full":
        return unsplit * model.hidden
    # What enters the two norms, attention and the MLP; queries, keys, values and what attention
    # gives; what the MLP has before and after its activation.
    mlp = model.mlp_matrices * model.ffn
    split = 2 * model.attention_width + 2 * model.key_value_width + mlp
    kept = unsplit * 4 * model.hidden + tokens * options.activation_bytes * split / mesh.tensor
    if mesh.attention_backend in _KEEP_SCORES and recompute == "none":
        scores = tokens * model.seq_length * model.heads / mesh.tensor
        kept += scores * (_SCORES_KEPT * options.activation_bytes + _MASK_BYTES)
    return kept


def head_activation_bytes(model: ModelShape, mesh: Mesh, *, options: TrainingOptions) -> float:
    """What the final norm, the output layer and the loss of one micro-batch keep on one rank."""
    tokens = model.seq_length * (mesh.micro_batch_size or 1)
    unsplit = tokens * options.activation_bytes / (mesh.tensor if mesh.sequence_parallel else 1)
    logits = tokens * model.vocabulary / mesh.tensor
    return 2 * unsplit * model.hidden + logits * (options.activation_bytes + _LOSS_BYTES)
