"""The shape of a GPT model: parameter counts, FLOPs, activation sizes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hetero.errors import UserError
from hetero.plan.expert_layers import has_experts, layer_pattern
from hetero.plan.plan import context_problems
from hetero.planner.latent_attention import LatentAttention
from hetero.presets import model_file
from hetero.text import counted
from hetero.yaml_file import load_yaml

"""Flag files of well-known models, found by name."""

_SIZES = (
    "layers",
    "hidden",
    "ffn",
    "heads",
    "query_groups",
    "head_size",
    "vocabulary",
    "seq_length",
)


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer: an embedding, layers, a final norm and an output layer.

    Layers are equal, or of two sorts: dense ones, and sparse ones, whose MLP is a mixture of
    experts. Behind the last one there may be layers for multi-token prediction (MTP), each like it
    in sort and sizes.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    query_groups: int
    head_size: int
    vocabulary: int
    """Rows of the embedding, padding included."""
    seq_length: int
    """Tokens of a sample."""
    gated: bool
    """Whether the MLP has a gate (SwiGLU): a third matrix."""
    tied: bool
    """Whether the output layer shares the embedding's weight."""
    linear_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalized, with one weight for all heads."""
    qk_norm_across_heads: bool = False
    """Whether that norm has weights for every head."""
    norm_weights: int = 1
    """Learned vectors per norm: 1 for RMSNorm, 2 for LayerNorm."""
    learned_positions: int = 0
    """Rows of the learned position embedding; 0 without one."""
    num_experts: int = 0
    """Of a sparse layer; 0 for a dense model."""
    expert_ffn: int = 0
    """Inner width of each expert."""
    experts_per_token: int = 0
    """Experts that a router chooses for a token."""
    shared_ffn: int = 0
    """Inner width of the experts that every token passes, all together."""
    shared_gate: bool = False
    """Whether a gate weighs their output."""
    sparse_pattern: tuple[int, ...] = ()
    """1 for each sparse layer and 0 for each dense one; empty where all are dense."""
    latent: LatentAttention | None = None
    """Multi-latent attention, whose heads are `head_size` wide in queries and keys; None: keys and
    values are projected directly."""
    mtp_layers: int = 0
    """Layers for multi-token prediction, beside `layers`."""

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in _SIZES}
        problems = [
            f"{name} is {size}; give at least 1" for name, size in sizes.items() if size < 1
        ]
        if self.query_groups > 0 and self.heads % self.query_groups:
            problems.append(
                f"{self.heads} attention heads do not divide into {self.query_groups} query groups"
            )
        if self.mtp_layers < 0:
            problems.append(f"mtp-num-layers is {self.mtp_layers}; give at least 0")
        if self.num_experts:
            problems += self._expert_problems()
        if problems:
            raise UserError(*problems)

    def _expert_problems(self) -> list[str]:
        problems = []
        if len(self.sparse_pattern) != self.layers:
            problems.append(
                f"moe-layer-freq has {counted(len(self.sparse_pattern), 'number')} for "
                f"{counted(self.layers, 'layer')}; give a 0 or 1 for each layer"
            )
        if self.expert_ffn < 1:
            problems.append(f"moe-ffn-hidden-size is {self.expert_ffn}; give at least 1")
        if not 1 <= self.experts_per_token <= self.num_experts:
            problems.append(
                f"moe-router-topk is {self.experts_per_token}; give at least 1 and at most the "
                f"{self.num_experts} of num-experts"
            )
        return problems

    @property
    def needs_sequence_parallel(self) -> bool:
        """Whether tensor-parallel ranks have to divide the sequence: otherwise each would compute
        every token in the experts, and count the gradients of latent vectors once more."""
        return self.num_experts > 0 or self.latent is not None

    def divides(self, tensor: int, *, sequence_parallel: bool) -> bool:
        """Whether the model can be split evenly over `tensor` tensor-parallel ranks."""
        parts = [self.heads, self.query_groups, self.ffn, self.vocabulary]
        parts += [self.shared_ffn] if self.shared_ffn else []
        parts += [self.hidden] if self.mtp_layers else []
        parts += [self.seq_length] if sequence_parallel else []
        return not any(part % tensor for part in parts)

    def shares_sequences(self, context: int, tensor: int, *, sequence_parallel: bool) -> bool:
        """Whether `context` ranks can share its sequences, and `tensor` ranks the rows of each."""
        parts = tensor if sequence_parallel else 1
        return not any(context_problems(self.seq_length, context, parts, name=""))

    def divides_experts(self, experts: int, expert_tensor: int) -> bool:
        """Whether `experts` ranks can share its experts, and `expert_tensor` ranks each of them."""
        return not (self.num_experts % experts or self.expert_ffn % expert_tensor)

    def divided_sizes(self) -> str:
        """What tensor parallelism divides, for errors."""
        shared = f", {self.shared_ffn} of the shared experts" if self.shared_ffn else ""
        hidden = f", hidden size {self.hidden} of MTP layers" if self.mtp_layers else ""
        return (
            f"the model's {self.heads} heads, {self.query_groups} query groups, {self.ffn} of the "
            f"MLP{shared}{hidden}, {self.vocabulary} rows of vocabulary"
        )

    @cached_property
    def sparse_before(self) -> tuple[int, ...]:
        """Sparse layers before each layer, and of the whole model at last."""
        before = [0]
        for layer in range(self.layers):
            before.append(before[-1] + (self.sparse_pattern[layer] if self.num_experts else 0))
        return tuple(before)

    def sparse_layers(self, layers: range) -> int:
        """How many of consecutive layers, counted from 0 over the model, are sparse."""
        return self.sparse_before[layers.stop] - self.sparse_before[layers.start]

    @cached_property
    def sparse_behind(self) -> tuple[int, ...]:
        """Sparse layers among the last ones, by their number."""
        before = self.sparse_before
        return tuple(before[-1] - count for count in reversed(before))

    @cached_property
    def sparse_in_windows(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The fewest and the most sparse layers of any consecutive ones, by their number."""
        before = self.sparse_before
        windows = [
            [before[start + count] - before[start] for start in range(self.layers - count + 1)]
            for count in range(self.layers + 1)
        ]
        return tuple(map(min, windows)), tuple(map(max, windows))

    @property
    def all_sparse_layers(self) -> int:
        return self.sparse_before[-1]

    @property
    def attention_width(self) -> int:
        """Width of the queries."""
        return self.heads * self.head_size

    @property
    def output_width(self) -> int:
        """Width of the attention output."""
        return self.heads * self._value_size

    @property
    def key_width(self) -> int:
        return self.query_groups * self.head_size

    @property
    def value_width(self) -> int:
        return self.query_groups * self._value_size

    @property
    def _value_size(self) -> int:
        return self.head_size if self.latent is None else self.latent.value_size

    @property
    def latent_width(self) -> int:
        """Width of the latent vectors of a token; 0 without multi-latent attention."""
        return 0 if self.latent is None else self.latent.latent_width

    @property
    def projected_width(self) -> int:
        """What the projection to keys and values gives of a token."""
        if self.latent is None:
            return self.key_width + self.value_width
        return self.heads * self.latent.projected_size

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters of a dense layer's weight matrices."""
        if self.latent is None:
            inputs = self.attention_width + self.projected_width
            attention = self.hidden * (inputs + self.output_width)
        else:
            attention = self.latent.matrix_parameters(self.hidden, self.heads)
        return attention + self.mlp_matrices * self.hidden * self.ffn

    @property
    def layer_parameters(self) -> int:
        """Of a dense layer."""
        biases = 0
        if self.linear_bias:
            biases += 2 * self.hidden + (self.mlp_matrices - 1) * self.ffn
        if (self.linear_bias or self.qkv_bias) and self.latent is None:
            biases += self.attention_width + self.projected_width
        normed = 2 * self.hidden
        if self.latent is not None:
            normed += (self.latent.query_rank + self.latent.key_value_rank) * self.qk_norm
        elif self.qk_norm_across_heads:
            normed += self.attention_width + self.key_width
        elif self.qk_norm:
            normed += 2 * self.head_size
        return self.layer_matrix_parameters + biases + self.norm_weights * normed

    @property
    def sparse_matrix_parameters(self) -> int:
        """Parameters of a sparse layer's weight matrices, experts but the shared ones apart."""
        mlp = self.mlp_matrices * self.hidden
        attention = self.layer_matrix_parameters - mlp * self.ffn
        routed = self.hidden * (self.num_experts + self.shared_gate)
        return attention + routed + mlp * self.shared_ffn

    @property
    def sparse_layer_parameters(self) -> int:
        """Of a sparse layer, experts but the shared ones apart. Experts have no biases."""
        others = self.layer_parameters - self.layer_matrix_parameters
        return self.sparse_matrix_parameters + others

    @property
    def expert_parameters(self) -> int:
        """Of all experts of a sparse layer, the shared ones apart."""
        return self.num_experts * self.mlp_matrices * self.hidden * self.expert_ffn

    @property
    def embedding_parameters(self) -> int:
        return (self.vocabulary + self.learned_positions) * self.hidden

    @property
    def copied_parameters(self) -> int:
        """Of the embedding, which a last stage that is not the first has a copy of where the output
        layer or MTP layers share it; 0 where none does."""
        return self.vocabulary * self.hidden if self.tied or self.mtp_layers else 0

    @property
    def mtp_is_sparse(self) -> bool:
        """Whether MTP layers have experts, as the model's last layer then has."""
        return self.mtp_layers > 0 and self.sparse_layers(range(self.layers - 1, self.layers)) > 0

    @property
    def mtp_projection_parameters(self) -> int:
        """Of an MTP layer's projection, from a hidden state and an embedding to a hidden state."""
        return 2 * self.hidden**2

    @property
    def mtp_layer_parameters(self) -> int:
        """Of an MTP layer, experts but the shared ones apart: beside a layer it has the projection,
        norms of what that takes, and a final one."""
        layer = self.sparse_layer_parameters if self.mtp_is_sparse else self.layer_parameters
        norms = 3 * self.norm_weights * self.hidden
        return self.mtp_projection_parameters + norms + layer

    @property
    def head_parameters(self) -> int:
        """Of what the last stage has beside its layers: final norm, output layer and MTP layers,
        experts but the shared ones apart, with its copy of the embedding."""
        output = self.vocabulary * self.hidden if not self.tied else 0
        mtp = self.mtp_layers * self.mtp_layer_parameters
        return self.copied_parameters + output + self.norm_weights * self.hidden + mtp

    @property
    def head_expert_parameters(self) -> int:
        """Of all experts of MTP layers, the shared ones apart."""
        return self.mtp_layers * self.expert_parameters if self.mtp_is_sparse else 0

    @property
    def parameters(self) -> int:
        """Parameters of the model; what shares the embedding counts once."""
        sparse = self.all_sparse_layers
        layers = (self.layers - sparse) * self.layer_parameters
        layers += sparse * (self.sparse_layer_parameters + self.expert_parameters)
        ends = self.embedding_parameters + self.head_parameters - self.copied_parameters
        return layers + ends + self.head_expert_parameters

    @property
    def attention_flops(self) -> float:
        """Forward FLOPs of one sample's causal attention in one layer, without the projections."""
        return self.attention_flops_of(self.seq_length)

    def attention_flops_of(self, seq_length: int) -> float:
        """The same of a sample of so many tokens."""
        return 1.0 * seq_length**2 * (self.attention_width + self.output_width)

    @property
    def layer_flops(self) -> float:
        """Forward FLOPs of one sample in one dense layer; backward takes twice as many."""
        return 2.0 * self.seq_length * self.layer_matrix_parameters + self.attention_flops

    @property
    def expert_flops(self) -> float:
        """Forward FLOPs of one sample in the experts that a sparse layer's router chooses."""
        chosen = self.experts_per_token * self.mlp_matrices * self.hidden * self.expert_ffn
        return 2.0 * self.seq_length * chosen

    @property
    def sparse_layer_flops(self) -> float:
        """Forward FLOPs of one sample in one sparse layer."""
        others = 2.0 * self.seq_length * self.sparse_matrix_parameters
        return others + self.attention_flops + self.expert_flops

    @property
    def head_flops(self) -> float:
        """Forward FLOPs of one sample in the output layer, once: MTP layers use it too."""
        return 2.0 * self.seq_length * self.vocabulary * self.hidden

    @property
    def mtp_projection_flops(self) -> float:
        """Forward FLOPs of one sample in an MTP layer's projection."""
        return 2.0 * self.seq_length * self.mtp_projection_parameters

    @property
    def flops(self) -> float:
        """Training FLOPs of one sample, without recomputation."""
        sparse = self.all_sparse_layers
        layers = (self.layers - sparse) * self.layer_flops + sparse * self.sparse_layer_flops
        layer = self.sparse_layer_flops if self.mtp_is_sparse else self.layer_flops
        mtp = self.mtp_layers * (layer + self.mtp_projection_flops + self.head_flops)
        return 3.0 * (layers + self.head_flops + mtp)

    def boundary_bytes(self, micro_batch: int, element_bytes: int = 2) -> int:
        """Size of the hidden state between two stages for one micro-batch, not sharded."""
        return micro_batch * self.seq_length * self.hidden * element_bytes


def model_from_flags(flags: Mapping[str, Any], *, source: str) -> ModelShape:
    """The shape that Megatron's flags describe. Names in `flags` have no leading dashes."""
    dashed = {str(name).replace("_", "-"): value for name, value in flags.items()}
    given = {
        _OTHER_NAMES.get(name, name): value for name, value in dashed.items() if value is not None
    }
    problems: list[str] = []
    if missing := [name for name in _REQUIRED if name not in given]:
        problems.append(f"{source} does not say {', '.join(missing)}, without which it has no size")
    if given.get("tokenizer-type") == "ByteLevelTokenizer":
        more = given.get("tokenizer-special-tokens") or ()
        given.setdefault("vocab-size", _BYTE_LEVEL_TOKENS + len(more))
    if not {"padded-vocab-size", "vocab-size"} & set(given):
        problems.append(
            f"{source} does not say padded-vocab-size, the rows of the embedding; add it"
        )
    numbers: dict[str, int] = {}
    for name in (*_REQUIRED, *_OPTIONAL):
        if name in given:
            try:
                numbers[name] = _integer(given[name])
            except ValueError:
                problems.append(f"{source}: {name} is {given[name]!r}; it must be a whole number")
    if problems:
        raise UserError(*problems)
    hidden, heads = numbers["hidden-size"], numbers["num-attention-heads"]
    if "kv-channels" not in numbers and heads > 0 and hidden % heads:
        problems.append(
            f"{source}: hidden-size {hidden} is no multiple of the {heads} attention heads; give "
            "kv-channels, the width of one"
        )
    length = numbers["seq-length"]
    if (max_positions := numbers.get("max-position-embeddings", length)) < length:
        problems.append(
            f"{source}: max-position-embeddings {max_positions} is below a seq-length of {length}"
        )
    if problems:
        raise UserError(*problems)
    gated = bool(given.get("swiglu")) or given.get("activation-func") == "swiglu"
    # Padded as in a run whose tensor-parallel size divides the multiple.
    tokens = numbers.get("vocab-size", 0)
    multiple = max(numbers.get("make-vocab-size-divisible-by", _VOCABULARY_MULTIPLE), 1)
    positions = "rope" if given.get("use-rotary-position-embeddings") else "learned_absolute"
    learned = given.get("position-embedding-type", positions) == "learned_absolute"
    grouped = given.get("group-query-attention")
    linear_bias = bool(given.get("add-bias-linear", not given.get("disable-bias-linear")))
    ffn = numbers.get("ffn-hidden-size", hidden * 4 * 2 // 3 // 64 * 64 if gated else hidden * 4)
    try:
        latent = _latent_attention(numbers) if given.get("multi-latent-attention") else None
        return ModelShape(
            layers=numbers["num-layers"],
            hidden=hidden,
            ffn=ffn,
            heads=heads,
            query_groups=numbers.get("num-query-groups", 1) if grouped else heads,
            head_size=latent.head_size
            if latent
            else numbers.get("kv-channels", hidden // max(heads, 1)),
            vocabulary=numbers.get("padded-vocab-size", -(-tokens // multiple) * multiple),
            seq_length=numbers["seq-length"],
            gated=gated,
            tied=not given.get("untie-embeddings-and-output-weights"),
            linear_bias=linear_bias,
            qkv_bias=linear_bias or bool(given.get("add-qkv-bias")),
            qk_norm=bool(given.get("qk-layernorm")),
            qk_norm_across_heads=bool(given.get("qk-layernorm-across-heads")),
            norm_weights=1 if given.get("normalization") == "RMSNorm" else 2,
            learned_positions=numbers.get("max-position-embeddings", 0) if learned else 0,
            latent=latent,
            mtp_layers=numbers.get("mtp-num-layers", 0),
            **_of_experts(given, numbers, ffn=ffn),
        )
    except UserError as error:
        raise UserError(*(f"{source}: {sentence}" for sentence in error.sentences)) from error


def _latent_attention(numbers: Mapping[str, int]) -> LatentAttention:
    """What the flags say of its widths, with Megatron's defaults. Raises UserError."""
    return LatentAttention(
        key_value_rank=numbers.get("kv-lora-rank", 32),
        query_rank=numbers.get("q-lora-rank", 0),
        plain_size=numbers.get("qk-head-dim", 128),
        rotated_size=numbers.get("qk-pos-emb-head-dim", 64),
        value_size=numbers.get("v-head-dim", 128),
    )


def _of_experts(
    given: Mapping[str, Any], numbers: Mapping[str, int], *, ffn: int
) -> dict[str, Any]:
    """The fields of a mixture of experts. Raises UserError."""
    count, layers = numbers.get("num-experts", 0), numbers["num-layers"]
    if not count:
        return {}
    pattern = given.get("moe-layer-freq", 1)
    try:
        read = layer_pattern(str(pattern))
    except ValueError:
        raise UserError(
            f"moe-layer-freq is {pattern!r}; it must be a whole number of at least 1, or a list "
            "with a 0 or 1 for each layer"
        ) from None
    each = [int(has_experts(read, n)) for n in range(layers)] if isinstance(read, int) else read
    shared = numbers.get("moe-shared-expert-intermediate-size", 0)
    return {
        "num_experts": count,
        "expert_ffn": numbers.get("moe-ffn-hidden-size", ffn),
        "experts_per_token": numbers.get("moe-router-topk", 2),
        "shared_ffn": shared,
        "shared_gate": bool(shared and given.get("moe-shared-expert-gate")),
        "sparse_pattern": tuple(each),
    }


def _integer(value: object) -> int:
    """An integer or its text as an int. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(value)
    return int(value)


_OTHER_NAMES = {"encoder-num-layers": "num-layers", "encoder-seq-length": "seq-length"}
_BYTE_LEVEL_TOKENS = 256 + 2
"""One for each byte, one that ends a document and one that pads."""
_VOCABULARY_MULTIPLE = 128
"""Megatron's default."""
_REQUIRED = ("num-layers", "hidden-size", "num-attention-heads", "seq-length")
_OPTIONAL = (
    "ffn-hidden-size",
    "num-query-groups",
    "kv-channels",
    "padded-vocab-size",
    "vocab-size",
    "make-vocab-size-divisible-by",
    "max-position-embeddings",
    "num-experts",
    "moe-ffn-hidden-size",
    "moe-router-topk",
    "moe-shared-expert-intermediate-size",
    "kv-lora-rank",
    "q-lora-rank",
    "qk-head-dim",
    "qk-pos-emb-head-dim",
    "v-head-dim",
    "mtp-num-layers",
)
COUNTS = ("layers", "seq_length", "sparse_pattern", "mtp_layers")
"""Fields of which the costs of a layer, the embedding and the output layer do not depend: a profile
serves models that differ in them."""
UNSAID: Mapping[str, Any] = {
    "num_experts": 0,
    "expert_ffn": 0,
    "experts_per_token": 0,
    "shared_ffn": 0,
    "shared_gate": False,
    "latent": None,
    "mtp_layers": 0,
}
"""What a dense model has of fields that a profile from before them does not name."""


def load_model(name: str, **overrides: Any) -> ModelShape:
    """Read a YAML file of Megatron's flags, or a preset by its name.

    `overrides` take precedence over the file's flags (`seq_length=4096`).
    """
    flags, source = read_flags(name)
    flags |= {key.replace("_", "-"): value for key, value in overrides.items()}
    return model_from_flags(flags, source=source)


def read_flags(name: str) -> tuple[dict[str, Any], str]:
    """The flags of a model file without leading dashes, and the file's name for errors."""
    path = model_file(name)
    source = f"the model {path}"
    data = load_yaml(path, source=source)
    if not isinstance(data, Mapping):
        raise UserError(f"{source}: expected Megatron's flags, as in a preset")
    flags: dict[str, Any] = {}
    for key, value in data.items():
        flags |= value if isinstance(value, Mapping) else {key: value}
    return {str(key).replace("_", "-"): value for key, value in flags.items()}, source


def model_shape(args: argparse.Namespace, *, vocabulary: int | None = None) -> ModelShape:
    """The model of parsed flags.

    `vocabulary` is the number of rows of the embedding: by default those in memory
    (`--padded-vocab-size`); the tokenizer's size for what is useful of them.
    """
    flags = vars(args) | ({} if vocabulary is None else {"padded_vocab_size": vocabulary})
    return model_from_flags(flags, source="the command line")
