"""Names of tensors in a checkpoint, and the mapping of a rank's parameter to the whole tensor.

Names are those of megatron-core's local layers, counted over the whole model. TransformerEngine
fuses a norm into the linear layer after it and names its weight after that. A checkpoint has one
name for both, so that one mesh of a run may use TransformerEngine and another not. No torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.hetero.checkpoint.regions import Shard

if TYPE_CHECKING:
    import torch

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
EXPERT_BIAS = ".router.expert_bias"
"""The end of the name of a router's bias, which is trained without gradients."""
AMAX_HISTORY = ".fp8_amax_history"
"""The end of the name of the maxima that a layer's delayed fp8 scales follow from."""
VOCABULARY = (EMBEDDING, OUTPUT_LAYER)
"""Tensors with a row for each token, and rows of padding that depend on the layout."""

MAIN_COPY = "main"
"""The optimizer state of the float32 copies of weights of lower precision (main parameters)."""
ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")

_FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
_GATED = (".linear_fc1.weight", ".linear_fc1.bias")


def stored_name(name: str) -> str:
    """A parameter's name in a checkpoint, from its name in the whole model."""
    for fused, separate in _FUSED_NORMS:
        name = name.replace(fused, separate)
    return name


def fused_name(name: str) -> str:
    """The name that TransformerEngine's layers have for a tensor of a checkpoint."""
    for fused, separate in _FUSED_NORMS:
        name = name.replace(separate, fused)
    return name


def optimizer_name(state: str, name: str) -> str:
    """The name of the optimizer's `state` of a weight: `MAIN_COPY`, or one of torch's own keys."""
    return f"optimizer.{state}.{name}"


def shard_of(
    name: str, parameter: torch.Tensor, *, tp_rank: int, tp_size: int, gated: bool
) -> Shard:
    """The mapping of a tensor-parallel rank's parameter to the whole tensor.

    `gated`: fc1 stacks gate and up projection.
    """
    shape = tuple(parameter.shape)
    if not is_split(parameter, tp_size):
        return Shard.unsplit(shape)
    dim: int = parameter.partition_dim  # type: ignore[attr-defined]
    stacked = 2 if gated and name.endswith(_GATED) else 1
    return Shard.split(shape, dim=dim, rank=tp_rank, ranks=tp_size, stacked=stacked)


def is_split(parameter: torch.Tensor, tp_size: int) -> bool:
    """Whether tensor-parallel ranks have different slices of a parameter."""
    return tp_size > 1 and bool(getattr(parameter, "tensor_model_parallel", False))
