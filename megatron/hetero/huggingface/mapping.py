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
from megatron.hetero.huggingface.experts import expert_width, layers_with_experts
from megatron.hetero.huggingface.families import Experts, Family

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ExpertShape:
    """The sizes of a mixture of experts, and Hugging Face's names of its tensors."""

    layers: frozenset[int]
    """The layers that have experts."""
    count: int
    ffn: int
    """An expert's inner width."""
    shared: int = 0
    """The inner width of the experts that every token passes; 0 without them."""
    bias: bool = False
    """Whether the router has a bias of each expert's score."""
    module: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    @classmethod
    def from_args(cls, args: Mapping[str, Any], experts: Experts) -> ExpertShape:
        return cls(
            layers=layers_with_experts(args),
            count=args["num_experts"],
            ffn=expert_width(args),
            shared=args["moe_shared_expert_intermediate_size"] or 0,
            bias=args["moe_router_enable_expert_bias"],
            module=experts.module,
            projections=experts.projections,
        )


@dataclass(frozen=True)
class LatentShape:
    """The widths of multi-latent attention."""

    queries: int | None
    """The latent vector of queries; None if they are projected directly."""
    keys: int
    """The latent vector of keys and values."""
    plain: int
    """A head's queries and keys without positions."""
    rotated: int
    """Their part with positions."""
    values: int
    """A head's values."""

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> LatentShape:
        return cls(
            queries=args["q_lora_rank"],
            keys=args["kv_lora_rank"],
            plain=args["qk_head_dim"],
            rotated=args["qk_pos_emb_head_dim"],
            values=args["v_head_dim"],
        )


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
    experts: ExpertShape | None = None
    """None if all layers are dense."""
    latent: LatentShape | None = None
    """None without latent attention."""

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
            experts=ExpertShape.from_args(args, family.experts) if family.experts else None,
            latent=LatentShape.from_args(args) if family.latent_attention else None,
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

    @property
    def dtype(self) -> torch.dtype | None:
        """Ours, if it is not that of the parts."""
        return None

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


@dataclass(frozen=True)
class ExpertBiasRule(Rule):
    """A router's bias, which is in float32 here, whatever the model's dtype."""

    @property
    def dtype(self) -> torch.dtype | None:
        return torch.float32

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        (part,) = parts
        return part.float()


def rules(model: ModelShape) -> Iterator[Rule]:
    """Every tensor of the model, in the order of the layers."""
    yield _vocabulary(model, EMBEDDING, "model.embed_tokens.weight")
    for layer in range(model.layers):
        prefix, hf_prefix = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for ours, theirs in _NORMS[model.reordered_norm]:
            yield _plain(f"{prefix}{ours}.weight", f"{hf_prefix}{theirs}.weight", (model.hidden,))
        if model.latent is not None:
            yield from _latent_attention_rules(model, model.latent, prefix, hf_prefix)
        else:
            yield from _attention_rules(model, prefix, hf_prefix)
        if model.experts is not None and layer in model.experts.layers:
            yield from _expert_rules(model, model.experts, f"{prefix}mlp.", hf_prefix)
        else:
            yield from _mlp_rules(model, f"{prefix}mlp.", f"{hf_prefix}mlp.", model.ffn)
    yield _plain("decoder.final_layernorm.weight", "model.norm.weight", (model.hidden,))
    if not model.tied:
        yield _vocabulary(model, OUTPUT_LAYER, "lm_head.weight")


def _attention_rules(model: ModelShape, prefix: str, hf_prefix: str) -> Iterator[Rule]:
    hidden, attention = model.hidden, model.heads * model.channels
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


def _latent_attention_rules(
    model: ModelShape, latent: LatentShape, prefix: str, hf_prefix: str
) -> Iterator[Rule]:
    hidden, heads = model.hidden, model.heads
    queries = heads * (latent.plain + latent.rotated)
    shapes: dict[tuple[str, str], Shape] = {("linear_q_proj", "q_proj"): (queries, hidden)}
    if latent.queries is not None:
        shapes = {
            ("linear_q_down_proj", "q_a_proj"): (latent.queries, hidden),
            ("q_layernorm", "q_a_layernorm"): (latent.queries,),
            ("linear_q_up_proj", "q_b_proj"): (queries, latent.queries),
        }
    keys_and_values = heads * (latent.plain + latent.values)
    shapes |= {
        ("linear_kv_down_proj", "kv_a_proj_with_mqa"): (latent.keys + latent.rotated, hidden),
        ("kv_layernorm", "kv_a_layernorm"): (latent.keys,),
        ("linear_kv_up_proj", "kv_b_proj"): (keys_and_values, latent.keys),
        ("linear_proj", "o_proj"): (hidden, heads * latent.values),
    }
    for (ours, theirs), shape in shapes.items():
        yield _plain(
            f"{prefix}self_attention.{ours}.weight", f"{hf_prefix}self_attn.{theirs}.weight", shape
        )


def _mlp_rules(
    model: ModelShape,
    prefix: str,
    hf_prefix: str,
    ffn: int,
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[Rule]:
    """Of an MLP or an expert of the inner width `ffn`."""
    gate, up, down = projections
    shape = (2 * ffn, model.hidden)
    stacked = Part(f"{hf_prefix}gate_up_proj.weight", shape)
    separate = (Part(f"{hf_prefix}{name}.weight", (ffn, model.hidden)) for name in (gate, up))
    yield StackedRule(
        f"{prefix}linear_fc1.weight",
        shape,
        (stacked,) if model.fused_projections else tuple(separate),
    )
    yield _plain(f"{prefix}linear_fc2.weight", f"{hf_prefix}{down}.weight", (model.hidden, ffn))


def _expert_rules(
    model: ModelShape, experts: ExpertShape, prefix: str, hf_prefix: str
) -> Iterator[Rule]:
    module = f"{hf_prefix}{experts.module}."
    gate = (experts.count, model.hidden)
    yield _plain(f"{prefix}router.weight", f"{module}gate.weight", gate)
    if experts.bias:
        part = Part(f"{module}gate.e_score_correction_bias", (experts.count,))
        yield ExpertBiasRule(f"{prefix}router.expert_bias", part.shape, (part,))
    for number in range(experts.count):
        yield from _mlp_rules(
            model,
            f"{prefix}experts.local_experts.{number}.",
            f"{module}experts.{number}.",
            experts.ffn,
            experts.projections,
        )
    if experts.shared:
        yield from _mlp_rules(
            model, f"{prefix}shared_experts.", f"{module}shared_experts.", experts.shared
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
