"""What each flag does to the model, and what a checkpoint's value of it is therefore worth.

The one table for what --use-checkpoint-args takes, what must be equal before weights are loaded,
what a conversion has to express, and docs/checkpoints.md. A test walks the parser's groups of such
flags, so that a new flag cannot be left out. No torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Kind(Enum):
    """What has to be the same in the checkpoint and in the run that starts from it."""

    SHAPE = "shape"
    """The shape of a tensor: always equal."""
    MEANING = "meaning"
    """What the weights were trained to mean: always equal."""
    TUNABLE = "tunable"
    """Equal, unless a run that starts from weights alone types another value."""
    TRAINING = "training"
    """Acts in training only. Equal, unless the run types another value."""
    ROWS = "rows"
    """How many rows the vocabulary is padded to: another number is told."""
    TOKENIZER = "tokenizer"
    """Which tokenizer: compared by its size and by what it makes of a text."""
    LIMIT = "limit"
    """Taken, and free to be another."""
    SPELLING = "spelling"
    """Another way to type a flag of this table."""
    NONE = "none"
    """Does not change the function."""


COMPARED = frozenset({Kind.SHAPE, Kind.MEANING, Kind.TUNABLE, Kind.TRAINING})
_READ_AS_DEFAULT = COMPARED - {Kind.SHAPE}
TAKEN = COMPARED | {Kind.ROWS, Kind.TOKENIZER, Kind.LIMIT}


@dataclass(frozen=True)
class ModelFlag:
    """How one flag is treated, and why."""

    kind: Kind
    why: str
    only_with: Mapping[str, Any] = field(default_factory=dict)
    """Compared only where the checkpoint has these values of other flags, by destination."""


_ROPE = {"position_embedding_type": "rope"}
_START = "what weights start from; a checkpoint has them"
_FUSED = "the same sums, in one kernel or in several"
_PRECISION = "precision of the arithmetic, free to be chosen anew"
_SCALE = "the loss scale is divided out of the gradients again"
_SAMPLES = "what the model is shown, not what it computes"
_IDS = "which ids a text becomes"


def _rows(kind: Kind, why: str, *names: str) -> dict[str, ModelFlag]:
    return {name: ModelFlag(kind, why) for name in names}


MODEL_FLAGS: Mapping[str, ModelFlag] = {
    **_rows(
        Kind.SHAPE,
        "shape of the weights",
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
        *("group_query_attention", "num_query_groups", "untie_embeddings_and_output_weights"),
        *("swiglu", "normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm"),
    ),
    "max_position_embeddings": ModelFlag(
        Kind.SHAPE,
        "shape of learned positions; of others it is a limit, and is taken but not compared",
        {"position_embedding_type": "learned_absolute"},
    ),
    "position_embedding_type": ModelFlag(Kind.MEANING, "how the weights know positions"),
    "rotary_percent": ModelFlag(Kind.MEANING, "which part of a head is rotated", _ROPE),
    "rotary_interleaved": ModelFlag(Kind.MEANING, "which pairs are rotated", _ROPE),
    "squared_relu": ModelFlag(Kind.MEANING, "the MLP's activation"),
    "layernorm_zero_centered_gamma": ModelFlag(
        Kind.MEANING, "whether norms store their weight or one less"
    ),
    "layernorm_epsilon": ModelFlag(Kind.TUNABLE, "a term of every norm"),
    "rotary_base": ModelFlag(Kind.TUNABLE, "angles; longer contexts change them", _ROPE),
    "rotary_seq_len_interpolation_factor": ModelFlag(
        Kind.TUNABLE, "angles; longer contexts change them", _ROPE
    ),
    "use_rope_scaling": ModelFlag(Kind.TUNABLE, "angles; longer contexts change them", _ROPE),
    "rope_scaling_factor": ModelFlag(
        Kind.TUNABLE, "angles; longer contexts change them", {"use_rope_scaling": True}
    ),
    "bias_gelu_fusion": ModelFlag(
        Kind.TUNABLE,
        "fused with its bias, GeLU is approximated by tanh",
        {"swiglu": False, "squared_relu": False, "add_bias_linear": True},
    ),
    "apply_query_key_layer_scaling": ModelFlag(Kind.TUNABLE, "how scores are scaled"),
    **_rows(
        Kind.TRAINING, "noise while training, none after", "hidden_dropout", "attention_dropout"
    ),
    **_rows(
        Kind.ROWS,
        "rows of padding take part in the softmax",
        *("padded_vocab_size", "make_vocab_size_divisible_by"),
    ),
    "seq_length": ModelFlag(Kind.LIMIT, "length of the samples"),
    **_rows(
        Kind.TOKENIZER,
        _IDS,
        *("tokenizer_type", "tokenizer_model", "vocab_size", "vocab_file", "merge_file"),
        *("tokenizer_metadata", "tokenizer_special_tokens", "tiktoken_pattern"),
        *("tiktoken_num_special_tokens", "tiktoken_special_tokens"),
        *("tokenizer_sentencepiece_legacy", "tokenizer_hf_use_fast"),
        "tokenizer_hf_include_special_tokens",
    ),
    **_rows(
        Kind.SPELLING,
        "read as --position-embedding-type",
        *("use_rotary_position_embeddings", "add_position_embedding"),
    ),
    "trust_remote_code": ModelFlag(
        Kind.NONE, "a permission to run code, which every run gives anew"
    ),
    "vocab_extra_ids": ModelFlag(Kind.NONE, "no tokenizer here has extra ids"),
    "attention_softmax_in_fp32": ModelFlag(Kind.NONE, "attention kernels sum in float32 anyway"),
    "attention_backend": ModelFlag(Kind.NONE, "another kernel for the same attention"),
    "transformer_impl": ModelFlag(Kind.NONE, "whose layers compute the same"),
    **_rows(
        Kind.NONE,
        _FUSED,
        *("masked_softmax_fusion", "apply_rope_fusion", "no_persist_layer_norm"),
        *("bias_swiglu_fusion", "bias_dropout_fusion"),
        *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
    ),
    **_rows(
        Kind.NONE,
        _START,
        *("init_method_std", "embedding_init_method_std", "init_method_xavier_uniform"),
        *("perform_initialization", "use_cpu_initialization"),
    ),
    **_rows(
        Kind.NONE,
        _PRECISION,
        *("bf16", "fp16", "fp32_residual_connection", "accumulate_allreduce_grads_in_fp32"),
        *("grad_reduce_in_bf16", "fp16_lm_cross_entropy"),
    ),
    **_rows(
        Kind.NONE,
        _SCALE,
        *("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
    ),
    **_rows(
        Kind.NONE,
        _SAMPLES,
        *("num_workers", "dataloader_type", "reset_position_ids", "reset_attention_mask"),
        *("eod_mask_loss", "allow_ambiguous_pad_tokens", "create_attention_mask_in_dataloader"),
    ),
}

GROUPS = (
    *("model size", "attention", "positions", "layers of the block", "initial weights"),
    *("precision", "samples", "tokenizer"),
)
"""The parser's groups whose every flag is in `MODEL_FLAGS`, and whose flags are all of it."""


@dataclass(frozen=True)
class Spelling:
    """How a destination of the parser is typed."""

    options: tuple[str, ...]
    default: Any
    const: Any
    """What a flag without a value sets; None of a flag that takes one."""

    @property
    def option(self) -> str:
        return self.options[0]

    def typed(self, value: Any) -> str | None:
        """The words that give `value`; None for a switch that stays off, or for nothing."""
        if self.const is not None:
            return self.option if value == self.const else None
        words = value if isinstance(value, list | tuple) else [value]
        return None if value is None else " ".join([self.option, *map(str, words)])

    def word(self, value: Any) -> str:
        """`value` in a sentence about the flag."""
        if self.const is not None:
            return "on" if value == self.const else "off"
        return "not given" if value is None else str(value)


def spellings(parser: argparse.ArgumentParser) -> dict[str, Spelling]:
    """Of every flag of `MODEL_FLAGS` that the parser has, by destination."""
    return {
        action.dest: Spelling(
            options=tuple(action.option_strings),
            default=action.default,
            const=action.const if action.nargs == 0 else None,
        )
        for action in parser._actions
        if action.dest in MODEL_FLAGS
    }


def typed_destinations(
    spelled: Mapping[str, Spelling], typed_flags: Collection[str]
) -> frozenset[str]:
    """The destinations that the command line names itself."""
    return frozenset(
        name for name, spelling in spelled.items() if set(spelling.options) & set(typed_flags)
    )


@dataclass(frozen=True)
class Difference:
    """One flag of which the checkpoint and this run have different values."""

    kind: Kind
    spelling: Spelling
    there: Any
    here: Any
    is_typed: bool

    def is_allowed(self, *, weights_only: bool) -> bool:
        """Whether the run may have its own value, because it says so itself."""
        may_change = self.kind is Kind.TRAINING or (self.kind is Kind.TUNABLE and weights_only)
        return may_change and self.is_typed

    def __str__(self) -> str:
        return (
            f"{self.spelling.option} is {self.spelling.word(self.there)} there and "
            f"{self.spelling.word(self.here)} here{'' if self.is_typed else ' by default'}"
        )


def differences(
    stored: Mapping[str, Any],
    ours: Mapping[str, Any],
    *,
    spelled: Mapping[str, Spelling],
    typed: Collection[str],
) -> list[Difference]:
    """Every compared flag that both sides say and say differently."""
    theirs, mine = normal_form(stored), normal_form(ours)
    found = []
    for name, flag in MODEL_FLAGS.items():
        if flag.kind not in COMPARED or name not in theirs or name not in mine:
            continue
        if any(theirs.get(other) != value for other, value in flag.only_with.items()):
            continue
        if theirs[name] != mine[name]:
            found.append(
                Difference(flag.kind, spelled[name], theirs[name], mine[name], name in typed)
            )
    return found


def completed(stored: Mapping[str, Any], spelled: Mapping[str, Spelling]) -> dict[str, Any]:
    """`stored` with the defaults of flags that it does not mention, which its writer did not have.

    What decides a shape stays open: the tensors have it.
    """
    later = {n: s.default for n, s in spelled.items() if MODEL_FLAGS[n].kind in _READ_AS_DEFAULT}
    return later | dict(stored)


def normal_form(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, by destination, with one way to say each model where the flags have several."""
    found = dict(values)
    if found.get("use_rotary_position_embeddings"):
        found["position_embedding_type"] = "rope"
    if found.get("add_bias_linear"):
        found["add_qkv_bias"] = True
    heads = found.get("num_attention_heads")
    if heads is not None and "group_query_attention" in found:
        if not found["group_query_attention"]:
            found["num_query_groups"] = heads
        found["group_query_attention"] = found.get("num_query_groups", heads) != heads
    return found
