"""The effect of each flag of the model, which determines how a checkpoint's value is treated.

One table determines what --use-checkpoint-args takes, what must be equal before weights are loaded,
what a conversion must express, and what docs/checkpoints.md says. A test compares it with the
parser, so that no new flag is forgotten. Does not import torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from types import MappingProxyType
from typing import Any


class Kind(Enum):
    """When a flag must have the same value in a checkpoint and in a run that starts from it."""

    SHAPE = "shape"
    """Determines the shape of a tensor: always equal."""
    MEANING = "meaning"
    """Determines what trained weights compute: always equal."""
    TUNABLE = "tunable"
    """Equal, unless a run that loads only the weights types another value."""
    TRAINING = "training"
    """Has an effect in training only. Equal, unless the run types another value."""
    ROWS = "rows"
    """The padded rows of the vocabulary: another number is logged."""
    TOKENIZER = "tokenizer"
    """Determines the tokenizer, which is compared by its size and the tokens of a text."""
    LIMIT = "limit"
    """Taken, but not compared."""
    SPELLING = "spelling"
    """Another way to type a flag of this table."""
    NONE = "none"
    """Does not change the function."""


COMPARED = frozenset({Kind.SHAPE, Kind.MEANING, Kind.TUNABLE, Kind.TRAINING})
TAKEN = COMPARED | {Kind.ROWS, Kind.TOKENIZER, Kind.LIMIT}


@dataclass(frozen=True)
class ModelFlag:
    """The treatment of one flag."""

    kind: Kind
    why: str
    """The reason, for docs/checkpoints.md."""
    only_with: Mapping[str, Any] = field(default_factory=dict)
    """Compared only if other flags of the checkpoint have these values, by destination."""


_ROPE = {"position_embedding_type": "rope"}
_LATENT = {"multi_latent_attention": True}
_CONTEXT = "angles; longer contexts change them"
_START = "what weights start from; a checkpoint has them"
_FUSED = "the same sums, in one kernel or in several"
_PRECISION = "precision of the arithmetic, free to be chosen anew"
_SCALE = "the loss scale is divided out of the gradients again"
_SAMPLES = "what the model is shown, not what it computes"
_IDS = "which ids a text becomes"


def _flags(
    kind: Kind, why: str, *names: str, only_with: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, ModelFlag]:
    """Entries of the table, all treated alike."""
    return {name: ModelFlag(kind, why, only_with) for name in names}


MODEL_FLAGS: Mapping[str, ModelFlag] = {
    **_flags(
        Kind.SHAPE,
        "shape of the weights",
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
        *("group_query_attention", "num_query_groups", "untie_embeddings_and_output_weights"),
        *("swiglu", "normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm"),
        *("qk_layernorm_across_heads", "reordered_norm"),
    ),
    **_flags(
        Kind.MEANING,
        "which experts there are",
        *("num_experts", "moe_layer_freq", "moe_ffn_hidden_size"),
        *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    ),
    **_flags(
        Kind.MEANING,
        "which experts a token is sent to, and how their outputs are weighed",
        *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax"),
        *("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor"),
        "moe_router_enable_expert_bias",
    ),
    **_flags(
        Kind.TUNABLE,
        "which tokens an expert computes",
        *("moe_router_load_balancing_type", "moe_expert_capacity_factor"),
        *("moe_pad_expert_input_to_capacity", "moe_token_drop_policy"),
    ),
    **_flags(
        Kind.TRAINING,
        "what balances loads while training",
        *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"),
        "moe_router_force_load_balancing",
    ),
    "multi_latent_attention": ModelFlag(Kind.MEANING, "another attention"),
    **_flags(
        Kind.MEANING,
        "widths of latent attention",
        *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        only_with=_LATENT,
    ),
    "rope_type": ModelFlag(Kind.TUNABLE, _CONTEXT, _LATENT),
    **_flags(
        Kind.TUNABLE,
        _CONTEXT,
        *("rotary_scaling_factor", "mscale", "mscale_all_dim"),
        only_with={"rope_type": "yarn"},
    ),
    "mtp_num_layers": ModelFlag(Kind.MEANING, "which layers for multi-token prediction there are"),
    "mtp_loss_scaling_factor": ModelFlag(Kind.TRAINING, "the weight of those layers' losses"),
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
    **_flags(
        Kind.TUNABLE,
        _CONTEXT,
        *("rotary_base", "rotary_seq_len_interpolation_factor", "use_rope_scaling"),
        only_with=_ROPE,
    ),
    "rope_scaling_factor": ModelFlag(Kind.TUNABLE, _CONTEXT, {"use_rope_scaling": True}),
    "bias_gelu_fusion": ModelFlag(
        Kind.TUNABLE,
        "fused with its bias, GeLU is approximated by tanh",
        {"swiglu": False, "squared_relu": False, "add_bias_linear": True},
    ),
    **_flags(
        Kind.MEANING,
        "a factor of what flows through the model",
        *("softmax_scale", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    ),
    "apply_query_key_layer_scaling": ModelFlag(Kind.TUNABLE, "how scores are scaled"),
    **_flags(
        Kind.TRAINING, "noise while training, none after", "hidden_dropout", "attention_dropout"
    ),
    **_flags(
        Kind.ROWS,
        "rows of padding take part in the softmax",
        *("padded_vocab_size", "make_vocab_size_divisible_by"),
    ),
    "seq_length": ModelFlag(Kind.LIMIT, "length of the samples"),
    **_flags(
        Kind.TOKENIZER,
        _IDS,
        *("tokenizer_type", "tokenizer_model", "vocab_size", "vocab_file", "merge_file"),
        *("tokenizer_metadata", "tokenizer_special_tokens", "tiktoken_pattern"),
        *("tiktoken_num_special_tokens", "tiktoken_special_tokens"),
        *("tokenizer_sentencepiece_legacy", "tokenizer_bos", "tokenizer_hf_use_fast"),
        "tokenizer_hf_include_special_tokens",
    ),
    **_flags(
        Kind.SPELLING,
        "read as --position-embedding-type",
        *("use_rotary_position_embeddings", "add_position_embedding"),
    ),
    "trust_remote_code": ModelFlag(
        Kind.NONE, "a permission to run code, which every run gives anew"
    ),
    "attention_softmax_in_fp32": ModelFlag(Kind.NONE, "attention kernels sum in float32 anyway"),
    "attention_backend": ModelFlag(Kind.NONE, "another kernel for the same attention"),
    "transformer_impl": ModelFlag(Kind.NONE, "whose layers compute the same"),
    **_flags(
        Kind.NONE,
        _FUSED,
        *("apply_rope_fusion", "bias_swiglu_fusion", "bias_dropout_fusion"),
        *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "moe_grouped_gemm"),
        *("moe_shared_expert_overlap", "moe_router_fusion"),
    ),
    **_flags(
        Kind.NONE,
        _START,
        *("init_method_std", "embedding_init_method_std", "init_method_xavier_uniform"),
    ),
    **_flags(
        Kind.NONE,
        _PRECISION,
        *("bf16", "fp16", "fp32_residual_connection", "accumulate_allreduce_grads_in_fp32"),
        *("grad_reduce_in_bf16", "fp16_lm_cross_entropy", "moe_router_dtype"),
        *("fp8_format", "fp8_recipe", "fp8_amax_history_len", "fp8_amax_compute_algo"),
        *("fp8_margin", "fp8_wgrad", "fp8_param_gather", "first_last_layers_bf16"),
        *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    ),
    **_flags(
        Kind.NONE,
        _SCALE,
        *("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
    ),
    **_flags(
        Kind.NONE,
        _SAMPLES,
        *("num_workers", "dataloader_type", "reset_position_ids", "reset_attention_mask"),
        *("eod_mask_loss", "allow_ambiguous_pad_tokens"),
    ),
}

GROUPS = (
    *("mixtures of experts", "routing to experts", "multi-token prediction"),
    *(
        "model size",
        "attention",
        "latent attention",
        "positions",
        "layers of the block",
        "initial weights",
    ),
    *("precision", "8-bit floating point", "samples", "tokenizer"),
)
"""The parser's groups whose flags, and no others, are in `MODEL_FLAGS`."""


@dataclass(frozen=True)
class Spelling:
    """A destination of the parser, as written on a command line."""

    options: tuple[str, ...]
    default: Any
    const: Any
    """The value that a flag without one sets; None for a flag that takes one."""
    takes_several: bool = False
    """Whether the elements of a list are words of their own."""

    @property
    def option(self) -> str:
        return self.options[0]

    def typed(self, value: Any) -> str | None:
        """The words that set `value`; None if the flag must be left out."""
        if self.const is not None:
            return self.option if value == self.const else None
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            return f"{self.option} {value}"
        words = map(str, value) if self.takes_several else [_repetitions(value)]
        return " ".join([self.option, *words])

    def word(self, value: Any) -> str:
        """`value` as a word of a message about the flag."""
        if self.const is not None:
            return "on" if value == self.const else "off"
        if isinstance(value, list):
            return " ".join(map(str, value)) if self.takes_several else _repetitions(value)
        return "not given" if value is None else str(value)


def _repetitions(values: Sequence[Any]) -> str:
    """A list in one word, as --moe-layer-freq takes it, such as [0]*1+[1]*26."""
    runs = ((value, len(list(run))) for value, run in groupby(values))
    return "+".join(f"[{value}]*{length}" for value, length in runs)


def spellings(parser: argparse.ArgumentParser) -> dict[str, Spelling]:
    """The spelling of every flag of `MODEL_FLAGS` that the parser has, by destination."""
    return {
        action.dest: Spelling(
            options=tuple(action.option_strings),
            default=action.default,
            const=action.const if action.nargs == 0 else None,
            takes_several=action.nargs == "+",
        )
        for action in parser._actions
        if action.dest in MODEL_FLAGS
    }


def typed_destinations(
    spelled: Mapping[str, Spelling], typed_flags: Collection[str]
) -> frozenset[str]:
    """The destinations of the typed flags."""
    return frozenset(
        name for name, spelling in spelled.items() if set(spelling.options) & set(typed_flags)
    )


@dataclass(frozen=True)
class Difference:
    """One flag whose values in the checkpoint and in this run differ."""

    kind: Kind
    spelling: Spelling
    there: Any
    here: Any
    is_typed: bool

    def is_allowed(self, *, weights_only: bool) -> bool:
        """Returns whether the run may have another value, which it must have typed."""
        may_change = self.kind is Kind.TRAINING or (self.kind is Kind.TUNABLE and weights_only)
        return may_change and self.is_typed

    def __str__(self) -> str:
        return (
            f"{self.spelling.option} is {self.spelling.word(self.there)} there and "
            f"{self.spelling.word(self.here)} here{'' if self.is_typed else ' by default'}"
        )


def differences(
    stored: Mapping[str, Any],
    own: Mapping[str, Any],
    *,
    spelled: Mapping[str, Spelling],
    typed: Collection[str],
) -> list[Difference]:
    """The compared flags that the checkpoint and the run both have, with different values.

    `stored` and `own` are their arguments by destination; `typed` has those of the typed flags.
    """
    there, here = normal_form(stored), normal_form(own)
    differing = []
    for name, flag in MODEL_FLAGS.items():
        if flag.kind not in COMPARED or name not in there or name not in here:
            continue
        if any(there.get(other) != value for other, value in flag.only_with.items()):
            continue
        if there[name] != here[name]:
            is_typed = name in typed
            differing.append(
                Difference(flag.kind, spelled[name], there[name], here[name], is_typed)
            )
    return differing


def completed(stored: Mapping[str, Any], spelled: Mapping[str, Spelling]) -> dict[str, Any]:
    """`stored`, with defaults for flags that are newer than the checkpoint.

    Flags that determine shapes are left out, because the tensors themselves show their shapes.
    """
    kinds = COMPARED - {Kind.SHAPE}
    defaults = {n: s.default for n, s in spelled.items() if MODEL_FLAGS[n].kind in kinds}
    return defaults | dict(stored)


def normal_form(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, by destination, in a form that is equal for equal models."""
    args = dict(values)
    if args.get("use_rotary_position_embeddings"):
        args["position_embedding_type"] = "rope"
    if args.get("add_bias_linear"):
        args["add_qkv_bias"] = True
    heads = args.get("num_attention_heads")
    if heads is not None and "group_query_attention" in args:
        if not args["group_query_attention"]:
            args["num_query_groups"] = heads
        args["group_query_attention"] = args.get("num_query_groups", heads) != heads
    if not args.get("num_experts"):
        args = {name: value for name, value in args.items() if not name.startswith("moe_")}
    period, layers = args.get("moe_layer_freq"), args.get("num_layers")
    if isinstance(period, int) and layers is not None:
        args["moe_layer_freq"] = [int(layer % period == 0) for layer in range(layers)]
    if args.get("moe_router_topk_scaling_factor") == 1.0:
        args["moe_router_topk_scaling_factor"] = None
    if not args.get("mtp_num_layers"):
        args = {name: value for name, value in args.items() if not name.startswith("mtp_")}
    return args
