"""Maps our tensors to Hugging Face's and back, for LLaMA and Qwen2. No files.

Ours have the names and layouts of megatron-core's local layers: queries, keys and values in one
tensor, interleaved by query group, and the gate and up projections stacked in one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.hetero.checkpoint.tensor_names import EMBEDDING, OUTPUT_LAYER

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide every tensor's shape."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    """Query groups."""
    channels: int
    """Width of a head."""
    vocabulary: int
    """Rows of Hugging Face's embedding."""
    rows: int
    """Rows of our embedding, with padding."""
    qkv_bias: bool
    tied: bool

    @classmethod
    def from_args(cls, args: Mapping[str, Any], *, vocabulary: int, rows: int) -> ModelShape:
        """From a checkpoint's arguments, by destination."""
        heads = args["num_attention_heads"]
        return cls(
            layers=args["num_layers"],
            hidden=args["hidden_size"],
            ffn=args["ffn_hidden_size"],
            heads=heads,
            groups=args["num_query_groups"] if args["group_query_attention"] else heads,
            channels=args["kv_channels"],
            vocabulary=vocabulary,
            rows=rows,
            qkv_bias=args["add_qkv_bias"],
            tied=not args["untie_embeddings_and_output_weights"],
        )


@dataclass(frozen=True)
class Part:
    """One of Hugging Face's tensors."""

    name: str
    shape: Shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Rule:
    """One of our tensors and Hugging Face's that it consists of: here one, which is the same."""

    name: str
    shape: Shape
    parts: tuple[Part, ...]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Build our tensor from Hugging Face's, in the order of `parts`."""
        (part,) = parts
        return part

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Split our tensor into Hugging Face's, in the order of `parts`."""
        return [whole]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class StackedRule(Rule):
    """The parts concatenated along the first dimension."""

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(whole.split([part.shape[0] for part in self.parts]))


@dataclass(frozen=True)
class GroupedRule(Rule):
    """Queries, keys and values, interleaved by query group: weights, or biases."""

    groups: int

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        grouped = [part.reshape(self.groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).reshape(self.shape)

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        grouped = whole.reshape(self.groups, -1, *whole.shape[1:])
        widths = [part.shape[0] // self.groups for part in self.parts]
        tensors = grouped.split(widths, dim=1)
        return [t.reshape(part.shape) for t, part in zip(tensors, self.parts, strict=True)]


@dataclass(frozen=True)
class VocabularyRule(Rule):
    """A row for each token; ours may be padded with rows of zeros."""

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        (part,) = parts
        if part.shape[0] == self.shape[0]:
            return part
        whole = part.new_zeros(self.shape)
        whole[: part.shape[0]] = part
        return whole

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole[: self.parts[0].shape[0]]]


def rules(model: ModelShape) -> Iterator[Rule]:
    """Every tensor of the model, in the order of the layers."""
    yield _vocabulary(model, EMBEDDING, "model.embed_tokens.weight")
    for layer in range(model.layers):
        yield from _layer_rules(model, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    yield _plain("decoder.final_layernorm.weight", "model.norm.weight", (model.hidden,))
    if not model.tied:
        yield _vocabulary(model, OUTPUT_LAYER, "lm_head.weight")


def _layer_rules(model: ModelShape, prefix: str, hf_prefix: str) -> Iterator[Rule]:
    hidden, attention = model.hidden, model.heads * model.channels
    yield _plain(f"{prefix}input_layernorm.weight", f"{hf_prefix}input_layernorm.weight", (hidden,))
    yield _qkv(model, prefix, hf_prefix, "weight", (hidden,))
    if model.qkv_bias:
        yield _qkv(model, prefix, hf_prefix, "bias", ())
    yield _plain(
        f"{prefix}self_attention.linear_proj.weight",
        f"{hf_prefix}self_attn.o_proj.weight",
        (hidden, attention),
    )
    yield _plain(
        f"{prefix}pre_mlp_layernorm.weight",
        f"{hf_prefix}post_attention_layernorm.weight",
        (hidden,),
    )
    yield StackedRule(
        f"{prefix}mlp.linear_fc1.weight",
        (2 * model.ffn, hidden),
        tuple(Part(f"{hf_prefix}mlp.{n}_proj.weight", (model.ffn, hidden)) for n in ("gate", "up")),
    )
    yield _plain(
        f"{prefix}mlp.linear_fc2.weight", f"{hf_prefix}mlp.down_proj.weight", (hidden, model.ffn)
    )


def _plain(name: str, hf_name: str, shape: Shape) -> Rule:
    return Rule(name, shape, (Part(hf_name, shape),))


def _vocabulary(model: ModelShape, name: str, hf_name: str) -> Rule:
    part = Part(hf_name, (model.vocabulary, model.hidden))
    return VocabularyRule(name, (model.rows, model.hidden), (part,))


def _qkv(model: ModelShape, prefix: str, hf_prefix: str, kind: str, inner: Shape) -> Rule:
    """`kind` is weight or bias, `inner` the shape of a row."""
    rows = {
        "q": model.heads * model.channels,
        "k": model.groups * model.channels,
        "v": model.groups * model.channels,
    }
    return GroupedRule(
        f"{prefix}self_attention.linear_qkv.{kind}",
        (sum(rows.values()), *inner),
        tuple(Part(f"{hf_prefix}self_attn.{n}_proj.{kind}", (r, *inner)) for n, r in rows.items()),
        groups=model.groups,
    )
