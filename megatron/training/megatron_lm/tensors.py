"""The tensors of a GPT that its arguments ask for: names, shapes, and how tensor parallelism cuts.

Names are those of our checkpoints, counted over the whole model. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.training.checkpoint.regions import Region, Shard
from megatron.training.checkpoint.tensor_names import EMBEDDING, OUTPUT_LAYER

Shape = tuple[int, ...]
POSITIONS = "embedding.position_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm."
LAYERS = "decoder.layers."


@dataclass(frozen=True)
class ModelTensor:
    """One tensor of the whole model."""

    name: str
    shape: Shape
    split: int | None = None
    """The dimension that tensor parallelism cuts."""
    stacked: int = 1
    """Of how many tensors, one behind the other, each rank has a slice."""
    layer: int | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def tail(self) -> str:
        """Its name within its layer, or its whole name."""
        return self.name if self.layer is None else self.name.split(".", 3)[3]

    @property
    def region(self) -> Region:
        return Region((0,) * len(self.shape), self.shape)

    def shard(self, rank: int, ranks: int) -> Shard:
        """How a tensor-parallel rank's tensor lies in it. `divides` must hold."""
        if self.split is None or ranks == 1:
            return Shard.unsplit(self.shape)
        local = tuple(n // ranks if d == self.split else n for d, n in enumerate(self.shape))
        return Shard.split(local, dim=self.split, rank=rank, ranks=ranks, stacked=self.stacked)

    def divides(self, ranks: int) -> bool:
        return self.split is None or self.shape[self.split] % (ranks * self.stacked) == 0


def model_tensors(args: Mapping[str, Any], *, rows: int) -> list[ModelTensor]:
    """Every tensor of the model, in megatron-core's order of parameters (local layers).

    `args` are ours, by destination; `rows` are those of the vocabulary, padding included.
    """
    hidden = args["hidden_size"]
    found = [ModelTensor(EMBEDDING, (rows, hidden), split=0)]
    if args["position_embedding_type"] == "learned_absolute":
        found.append(ModelTensor(POSITIONS, (args["max_position_embeddings"], hidden)))
    for layer in range(args["num_layers"]):
        found += _layer(args, layer)
    found += _norm(args, FINAL_NORM, hidden, None)
    if args["untie_embeddings_and_output_weights"]:
        found.append(ModelTensor(OUTPUT_LAYER, (rows, hidden), split=0))
    return found


def _layer(args: Mapping[str, Any], layer: int) -> Iterator[ModelTensor]:
    prefix = f"{LAYERS}{layer}."
    hidden, ffn, heads = args["hidden_size"], args["ffn_hidden_size"], args["num_attention_heads"]
    groups = args["num_query_groups"] if args["group_query_attention"] else heads
    channels = args["kv_channels"]
    biases, stacked = args["add_bias_linear"], 2 if args["swiglu"] else 1

    def tensor(name: str, *shape: int, split: int | None, stacked: int = 1) -> ModelTensor:
        return ModelTensor(prefix + name, shape, split=split, stacked=stacked, layer=layer)

    yield from _norm(args, f"{prefix}input_layernorm.", hidden, layer)
    yield tensor("self_attention.linear_proj.weight", hidden, heads * channels, split=1)
    if biases:
        yield tensor("self_attention.linear_proj.bias", hidden, split=None)
    queries = (heads + 2 * groups) * channels
    yield tensor("self_attention.linear_qkv.weight", queries, hidden, split=0)
    if biases or args["add_qkv_bias"]:
        yield tensor("self_attention.linear_qkv.bias", queries, split=0)
    if args["qk_layernorm"]:
        yield from _norm(args, f"{prefix}self_attention.q_layernorm.", channels, layer)
        yield from _norm(args, f"{prefix}self_attention.k_layernorm.", channels, layer)
    yield from _norm(args, f"{prefix}pre_mlp_layernorm.", hidden, layer)
    yield tensor("mlp.linear_fc1.weight", stacked * ffn, hidden, split=0, stacked=stacked)
    if biases:
        yield tensor("mlp.linear_fc1.bias", stacked * ffn, split=0, stacked=stacked)
    yield tensor("mlp.linear_fc2.weight", hidden, ffn, split=1)
    if biases:
        yield tensor("mlp.linear_fc2.bias", hidden, split=None)


def _norm(
    args: Mapping[str, Any], prefix: str, width: int, layer: int | None
) -> Iterator[ModelTensor]:
    yield ModelTensor(f"{prefix}weight", (width,), layer=layer)
    if args["normalization"] == "LayerNorm":
        yield ModelTensor(f"{prefix}bias", (width,), layer=layer)


def buffer_order(tensors: Sequence[ModelTensor], *, fused_norms: bool) -> list[ModelTensor]:
    """Tensors of one chunk as megatron-core's gradient buffers hold them: the last one first.

    Transformer Engine has a norm's weights in the linear layer behind it, before that one's own.
    """
    order = list(tensors)
    if fused_norms:
        for norm in [t for t in tensors if t.tail.startswith("input_layernorm.")]:
            order.remove(norm)
            behind = f"{LAYERS}{norm.layer}.self_attention.linear_qkv.weight"
            order.insert(next(i for i, t in enumerate(order) if t.name == behind), norm)
    return order[::-1]


def layer_starts(counts: Sequence[int]) -> list[int]:
    """The first layer of each chunk, of chunks in the order in which layers go through them."""
    return [sum(counts[:number]) for number in range(len(counts))]
