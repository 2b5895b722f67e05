"""The tensors of a GPT by its arguments: names, shapes, and how tensor parallelism splits them.

Names are those of our checkpoints, with layers counted over the whole model. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.hetero.checkpoint.regions import Region, Shard
from megatron.hetero.checkpoint.tensor_names import EMBEDDING, OUTPUT_LAYER

Shape = tuple[int, ...]
POSITIONS = "embedding.position_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm."
LAYERS = "decoder.layers."


@dataclass(frozen=True)
class ModelTensor:
    """One tensor of the whole model."""

    name: str
    shape: Shape
    partition_dim: int | None = None
    """The dimension that tensor parallelism splits; None if all ranks have the whole tensor."""
    stacked: int = 1
    """The number of tensors stacked along that dimension. A rank has a slice of each."""
    layer: int | None = None
    """From 0; None outside of the layers."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def name_in_layer(self) -> str:
        """Its name without the prefix of its layer."""
        return self.name if self.layer is None else self.name.split(".", 3)[3]

    @property
    def region(self) -> Region:
        return Region.whole(self.shape)

    def shard(self, tp_rank: int, tp_size: int) -> Shard:
        """The mapping of a tensor-parallel rank's slice to the tensor, which must be divisible."""
        if self.partition_dim is None or tp_size == 1:
            return Shard.unsplit(self.shape)
        local = list(self.shape)
        local[self.partition_dim] //= tp_size
        return Shard.split(
            tuple(local),
            dim=self.partition_dim,
            rank=tp_rank,
            ranks=tp_size,
            stacked=self.stacked,
        )


def model_tensors(args: Mapping[str, Any], *, rows: int) -> list[ModelTensor]:
    """Every tensor of the model, in the order of megatron-core's parameters with local layers.

    `args` are our arguments by destination, `rows` the embedding's rows with padding.
    """
    hidden = args["hidden_size"]
    tensors = [ModelTensor(EMBEDDING, (rows, hidden), partition_dim=0)]
    if args["position_embedding_type"] == "learned_absolute":
        tensors.append(ModelTensor(POSITIONS, (args["max_position_embeddings"], hidden)))
    for layer in range(args["num_layers"]):
        tensors += _layer_tensors(args, layer)
    tensors += _norm(args, FINAL_NORM, hidden, None)
    if args["untie_embeddings_and_output_weights"]:
        tensors.append(ModelTensor(OUTPUT_LAYER, (rows, hidden), partition_dim=0))
    return tensors


def _layer_tensors(args: Mapping[str, Any], layer: int) -> Iterator[ModelTensor]:
    prefix = f"{LAYERS}{layer}."
    hidden, ffn, heads = args["hidden_size"], args["ffn_hidden_size"], args["num_attention_heads"]
    groups = args["num_query_groups"] if args["group_query_attention"] else heads
    channels = args["kv_channels"]
    biases, stacked = args["add_bias_linear"], 2 if args["swiglu"] else 1

    def tensor(name: str, *shape: int, dim: int | None, stacked: int = 1) -> ModelTensor:
        return ModelTensor(prefix + name, shape, partition_dim=dim, stacked=stacked, layer=layer)

    yield from _norm(args, f"{prefix}input_layernorm.", hidden, layer)
    yield tensor("self_attention.linear_proj.weight", hidden, heads * channels, dim=1)
    if biases:
        yield tensor("self_attention.linear_proj.bias", hidden, dim=None)
    qkv = (heads + 2 * groups) * channels
    yield tensor("self_attention.linear_qkv.weight", qkv, hidden, dim=0)
    if biases or args["add_qkv_bias"]:
        yield tensor("self_attention.linear_qkv.bias", qkv, dim=0)
    if args["qk_layernorm"]:
        yield from _norm(args, f"{prefix}self_attention.q_layernorm.", channels, layer)
        yield from _norm(args, f"{prefix}self_attention.k_layernorm.", channels, layer)
    yield from _norm(args, f"{prefix}pre_mlp_layernorm.", hidden, layer)
    yield tensor("mlp.linear_fc1.weight", stacked * ffn, hidden, dim=0, stacked=stacked)
    if biases:
        yield tensor("mlp.linear_fc1.bias", stacked * ffn, dim=0, stacked=stacked)
    yield tensor("mlp.linear_fc2.weight", hidden, ffn, dim=1)
    if biases:
        yield tensor("mlp.linear_fc2.bias", hidden, dim=None)


def _norm(
    args: Mapping[str, Any], prefix: str, width: int, layer: int | None
) -> Iterator[ModelTensor]:
    yield ModelTensor(f"{prefix}weight", (width,), layer=layer)
    if args["normalization"] == "LayerNorm":
        yield ModelTensor(f"{prefix}bias", (width,), layer=layer)


def chunk_tensors(
    tensors: Sequence[ModelTensor], layers: range, *, is_first: bool, is_last: bool
) -> list[ModelTensor]:
    """The tensors of a model chunk with these layers, in the order of `tensors`.

    Beyond its first chunk, a tied model's last one has a copy of the embedding as its output layer:
    the embedding comes last then.
    """

    def is_in_chunk(tensor: ModelTensor) -> bool:
        if tensor.layer is not None:
            return tensor.layer in layers
        return is_first if tensor.name in (EMBEDDING, POSITIONS) else is_last

    chunk = [tensor for tensor in tensors if is_in_chunk(tensor)]
    if is_last and not is_first and all(tensor.name != OUTPUT_LAYER for tensor in tensors):
        chunk += [tensor for tensor in tensors if tensor.name == EMBEDDING]
    return chunk


def buffer_order(tensors: Sequence[ModelTensor], *, fused_norms: bool) -> list[ModelTensor]:
    """The tensors of a model chunk in the order of megatron-core's gradient buffer, last one first.

    With `fused_norms`, Transformer Engine's layers: a norm's weights are parameters of the linear
    layer after it, before that layer's own.
    """
    order = list(tensors)
    if fused_norms:
        for norm in [t for t in tensors if t.name_in_layer.startswith("input_layernorm.")]:
            order.remove(norm)
            linear = f"{LAYERS}{norm.layer}.self_attention.linear_qkv.weight"
            order.insert(next(i for i, t in enumerate(order) if t.name == linear), norm)
    return order[::-1]
