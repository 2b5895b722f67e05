"""Maps our tensors to Hugging Face's and back, for each family. No files.

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
from megatron.hetero.huggingface.families import Family

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelShape:
    """The sizes that determine every tensor's shape."""

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
    query_norm: int = 0
    """Width of the norm of queries; 0 without one."""
    key_norm: int = 0
    reordered_norm: bool = False
    """True if norms come after attention and MLP."""
    fused_projections: bool = False
    """True if Hugging Face's model has one tensor for queries, keys and values."""

    @classmethod
    def from_args(
        cls, args: Mapping[str, Any], *, family: Family, vocabulary: int, rows: int
    ) -> ModelShape:
        """From a checkpoint's arguments, by destination."""
        heads, width = args["num_attention_heads"], args["kv_channels"]
        groups = args["num_query_groups"] if args["group_query_attention"] else heads
        normed = (0, 0)
        if args["qk_layernorm"]:
            across = args.get("qk_layernorm_across_heads", False)
            normed = (heads * width, groups * width) if across else (width, width)
        return cls(
            layers=args["num_layers"],
            hidden=args["hidden_size"],
            ffn=args["ffn_hidden_size"],
            heads=heads,
            groups=groups,
            channels=width,
            vocabulary=vocabulary,
            rows=rows,
            qkv_bias=args["add_qkv_bias"],
            tied=not args["untie_embeddings_and_output_weights"],
            query_norm=normed[0],
            key_norm=normed[1],
            reordered_norm=args.get("reordered_norm", False),
            fused_projections=family.fused_projections,
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
    """One of our tensors and Hugging Face's that it consists of: in the base class a single one."""

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
    rows: tuple[int, int, int]
    """The rows of the queries, keys and values, which may be one part or three."""

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        three = parts[0].split(self.rows) if len(parts) == 1 else parts
        grouped = [part.reshape(self.groups, -1, *part.shape[1:]) for part in three]
        return torch.cat(grouped, dim=1).reshape(self.shape)

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        grouped = whole.reshape(self.groups, -1, *whole.shape[1:])
        three = [
            tensor.reshape(rows, *whole.shape[1:])
            for tensor, rows in zip(
                grouped.split([rows // self.groups for rows in self.rows], dim=1),
                self.rows,
                strict=True,
            )
        ]
        return [torch.cat(three)] if len(self.parts) == 1 else three


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
    for ours, theirs in _NORMS[model.reordered_norm]:
        yield _plain(f"{prefix}{ours}.weight", f"{hf_prefix}{theirs}.weight", (hidden,))
    yield _qkv(model, prefix, hf_prefix, "weight", (hidden,))
    if model.qkv_bias:
        yield _qkv(model, prefix, hf_prefix, "bias", ())
    for letter, width in (("q", model.query_norm), ("k", model.key_norm)):
        if width:
            yield _plain(
                f"{prefix}self_attention.{letter}_layernorm.weight",
                f"{hf_prefix}self_attn.{letter}_norm.weight",
                (width,),
            )
    yield _plain(
        f"{prefix}self_attention.linear_proj.weight",
        f"{hf_prefix}self_attn.o_proj.weight",
        (hidden, attention),
    )
    yield _gate_and_up(model, f"{prefix}mlp.linear_fc1.weight", f"{hf_prefix}mlp.")
    yield _plain(
        f"{prefix}mlp.linear_fc2.weight", f"{hf_prefix}mlp.down_proj.weight", (hidden, model.ffn)
    )


# Our names and theirs, without and with --reordered-norm.
_NORMS = {
    False: (
        ("input_layernorm", "input_layernorm"),
        ("pre_mlp_layernorm", "post_attention_layernorm"),
    ),
    True: (
        ("self_attn_bda.norm", "post_attention_layernorm"),
        ("mlp_bda.norm", "post_feedforward_layernorm"),
    ),
}


def _gate_and_up(model: ModelShape, name: str, hf_prefix: str) -> Rule:
    shape = (2 * model.ffn, model.hidden)
    if model.fused_projections:
        return _plain(name, f"{hf_prefix}gate_up_proj.weight", shape)
    parts = (Part(f"{hf_prefix}{n}_proj.weight", (model.ffn, model.hidden)) for n in ("gate", "up"))
    return StackedRule(name, shape, tuple(parts))


def _plain(name: str, hf_name: str, shape: Shape) -> Rule:
    return Rule(name, shape, (Part(hf_name, shape),))


def _vocabulary(model: ModelShape, name: str, hf_name: str) -> Rule:
    part = Part(hf_name, (model.vocabulary, model.hidden))
    return VocabularyRule(name, (model.rows, model.hidden), (part,))


def _qkv(model: ModelShape, prefix: str, hf_prefix: str, kind: str, inner: Shape) -> Rule:
    """`kind` is weight or bias, `inner` the shape of a row."""
    keys = model.groups * model.channels
    rows = (model.heads * model.channels, keys, keys)
    named = [("qkv", sum(rows))]
    if not model.fused_projections:
        named = list(zip("qkv", rows, strict=True))
    return GroupedRule(
        f"{prefix}self_attention.linear_qkv.{kind}",
        (sum(rows), *inner),
        tuple(Part(f"{hf_prefix}self_attn.{n}_proj.{kind}", (r, *inner)) for n, r in named),
        groups=model.groups,
        rows=rows,
    )
