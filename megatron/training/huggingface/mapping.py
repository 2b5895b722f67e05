"""Which of our tensors consists of which of Hugging Face's, for LLaMA and Qwen2. Pure.

Ours are named and laid out as megatron-core's local layers have them: queries, keys and values in
one tensor, interleaved by query group, and the gate and up projections stacked in one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide every tensor's shape.

    `vocabulary` counts Hugging Face's rows of the embedding, `rows` ours, padding included.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    channels: int
    vocabulary: int
    rows: int
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
    """One of our tensors and the parts that it consists of; here it is the part itself."""

    name: str
    shape: Shape
    parts: tuple[Part, ...]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Ours, from Hugging Face's in the order of `parts`."""
        (part,) = parts
        return part

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Hugging Face's, in the order of `parts`, from ours."""
        return [whole]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class StackedRule(Rule):
    """The parts one after another."""

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(whole.split([part.shape[0] for part in self.parts]))


@dataclass(frozen=True)
class GroupedRule(Rule):
    """For each query group its queries, its key, its value: weights, or biases."""

    groups: int

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        grouped = [part.reshape(self.groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).reshape(self.shape)

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        grouped = whole.reshape(self.groups, -1, *whole.shape[1:])
        widths = [part.shape[0] // self.groups for part in self.parts]
        found = grouped.split(widths, dim=1)
        return [t.reshape(part.shape) for t, part in zip(found, self.parts, strict=True)]


@dataclass(frozen=True)
class VocabularyRule(Rule):
    """A row for each token; ours may have rows of padding after them, which are zero."""

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
    yield _vocabulary(model, "embedding.word_embeddings.weight", "model.embed_tokens.weight")
    for layer in range(model.layers):
        yield from _layer_rules(model, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    yield _plain("decoder.final_layernorm.weight", "model.norm.weight", (model.hidden,))
    if not model.tied:
        yield _vocabulary(model, "output_layer.weight", "lm_head.weight")


def _layer_rules(model: ModelShape, ours: str, theirs: str) -> Iterator[Rule]:
    hidden, attention = model.hidden, model.heads * model.channels
    yield _plain(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight", (hidden,))
    yield _grouped(model, ours, theirs, "weight", (hidden,))
    if model.qkv_bias:
        yield _grouped(model, ours, theirs, "bias", ())
    yield _plain(
        f"{ours}self_attention.linear_proj.weight",
        f"{theirs}self_attn.o_proj.weight",
        (hidden, attention),
    )
    yield _plain(
        f"{ours}pre_mlp_layernorm.weight", f"{theirs}post_attention_layernorm.weight", (hidden,)
    )
    yield StackedRule(
        f"{ours}mlp.linear_fc1.weight",
        (2 * model.ffn, hidden),
        tuple(Part(f"{theirs}mlp.{n}_proj.weight", (model.ffn, hidden)) for n in ("gate", "up")),
    )
    yield _plain(
        f"{ours}mlp.linear_fc2.weight", f"{theirs}mlp.down_proj.weight", (hidden, model.ffn)
    )


def _plain(ours: str, theirs: str, shape: Shape) -> Rule:
    return Rule(ours, shape, (Part(theirs, shape),))


def _vocabulary(model: ModelShape, ours: str, theirs: str) -> Rule:
    part = Part(theirs, (model.vocabulary, model.hidden))
    return VocabularyRule(ours, (model.rows, model.hidden), (part,))


def _grouped(model: ModelShape, ours: str, theirs: str, kind: str, inner: Shape) -> Rule:
    rows = {
        "q": model.heads * model.channels,
        "k": model.groups * model.channels,
        "v": model.groups * model.channels,
    }
    return GroupedRule(
        f"{ours}self_attention.linear_qkv.{kind}",
        (sum(rows.values()), *inner),
        tuple(Part(f"{theirs}self_attn.{n}_proj.{kind}", (r, *inner)) for n, r in rows.items()),
        groups=model.groups,
    )
