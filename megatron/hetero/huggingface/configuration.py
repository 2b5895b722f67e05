"""Converts Hugging Face's config.json of a LLaMA or Qwen2 to our arguments and back. No files.

Settings that the other side cannot express are refused by name, because the model could otherwise
load and compute something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hetero.errors import UserError
from hetero.formatting import counted
from megatron.hetero.arguments.parser import build_parser
from megatron.hetero.checkpoint.model_flags import completed, spellings

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
# megatron-core implements --use-rope-scaling with these numbers only.
_LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_DEFAULT_SCALING_FACTOR = 8.0
_DEFAULT_ROPE_THETA = 10000.0
_JSON_NAMES: Mapping[type, str] = {list: "list", dict: "mapping"}
_DTYPES = ("float32", "bfloat16", "float16")
# Arguments that are the same for every LLaMA and Qwen2; config.json has no keys for them.
_FIXED_ARGS: Mapping[str, Any] = {
    "swiglu": True,
    "squared_relu": False,
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "add_bias_linear": False,
    "qk_layernorm": False,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "apply_query_key_layer_scaling": False,
}
T = TypeVar("T")


@dataclass(frozen=True)
class _Rope:
    """Rotary position embedding: its base and, if it is scaled, the factor."""

    theta: int
    llama3_factor: float | None = None
    linear_factor: int | None = None


def args_from_config(config: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Our arguments of the model, by destination.

    `padded_vocab_size` and `vocab_size` are the rows of the embedding. Raises UserError, which
    names `source`, for a setting that we have no flag for.
    """
    kind = _model_type(config, source)
    _require(
        source,
        (
            ("hidden_act", config.get("hidden_act", "silu"), "silu"),
            ("mlp_bias", config.get("mlp_bias", False), False),
            ("use_sliding_window", config.get("use_sliding_window", False), False),
            ("pretraining_tp", config.get("pretraining_tp", 1), 1),
            *(
                ("layer_types", layer, "full_attention")
                for layer in _typed(config, "layer_types", list, source)
            ),
            ("quantization_config", config.get("quantization_config"), None),
            # The model's own code may compute anything.
            ("auto_map", config.get("auto_map"), None),
            # In LLaMA it adds a bias to the output projection too; Qwen2 has no such key.
            ("attention_bias", kind == "llama" and config.get("attention_bias", False), False),
        ),
    )
    rope = _rope(config, source)
    sizes = _sizes(config, source)
    tied = config.get("tie_word_embeddings", False)
    return {
        **sizes,
        "padded_vocab_size": sizes["vocab_size"],
        "make_vocab_size_divisible_by": 128,
        **_FIXED_ARGS,
        "layernorm_epsilon": _number(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", source),
        "add_qkv_bias": kind == "qwen2",
        "rotary_base": rope.theta,
        "rotary_seq_len_interpolation_factor": rope.linear_factor,
        "use_rope_scaling": rope.llama3_factor is not None,
        "rope_scaling_factor": rope.llama3_factor or _DEFAULT_SCALING_FACTOR,
        "untie_embeddings_and_output_weights": not tied,
        "bias_gelu_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": _number(
            config.get("attention_dropout") or 0.0, "attention_dropout", source
        ),
    }


def _model_type(config: Mapping[str, Any], source: str) -> str:
    kind = str(config.get("model_type"))
    architectures = _typed(config, "architectures", list, source) or [ARCHITECTURES.get(kind)]
    if kind not in ARCHITECTURES or architectures != [ARCHITECTURES[kind]]:
        name = ", ".join(map(str, architectures)) if kind in ARCHITECTURES else f"{kind!r}"
        raise UserError(
            f"{source} is of the architecture {name}, which cannot be converted; those that can "
            f"are {' and '.join(ARCHITECTURES.values())}"
        )
    return kind


def _typed(config: Mapping[str, Any], name: str, kind: type[T], source: str) -> T:
    """A value that is an empty one where it is missing or null."""
    value = config.get(name) or kind()
    if not isinstance(value, kind):
        raise UserError(
            f"{source} has {name} {value!r} instead of a {_JSON_NAMES[kind]}; take the model's own "
            "config.json"
        )
    return value


def _number(value: Any, name: str, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UserError(
            f"{source} has {name} {value!r} instead of a number of at least 0; take the model's "
            "own config.json"
        )
    return float(value)


def _require(source: str, settings: Iterable[tuple[str, Any, Any]]) -> None:
    """Raise UserError unless each setting (name, value, supported value) has that value."""
    for name, value, supported in settings:
        if value != supported:
            raise UserError(
                f"{source} has {name} {value!r}, for which this program has no flag; only "
                f"{supported!r} can be converted"
            )


def _sizes(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The arguments that decide the shapes of tensors."""

    def size(name: str) -> int:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(
                f"{source} has {name} {value!r} instead of a whole number; take the model's own "
                "config.json"
            )
        return value

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    groups = heads if config.get("num_key_value_heads") is None else size("num_key_value_heads")
    if heads % groups:
        raise UserError(
            f"{source} has {counted(heads, 'attention head')} for "
            f"{counted(groups, 'key-value head')}"
        )
    return {
        "num_layers": size("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": size("intermediate_size"),
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "kv_channels": hidden // heads if config.get("head_dim") is None else size("head_dim"),
        "max_position_embeddings": size("max_position_embeddings"),
        "vocab_size": size("vocab_size"),
    }


def _rope(config: Mapping[str, Any], source: str) -> _Rope:
    parameters = _rope_parameters(config, source)
    theta = parameters.get("rope_theta", config.get("rope_theta", _DEFAULT_ROPE_THETA))
    theta = _number(theta, "rope_theta", source)
    if theta != int(theta) or not theta:
        raise UserError(f"{source} has rope_theta {theta}, and --rotary-base takes whole numbers")
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "llama3", "linear"):
        raise UserError(
            f"{source} has the rope scaling {kind!r}, for which this program has no flag; only "
            "'llama3' and 'linear' can be converted"
        )
    _require(source, (("partial_rotary_factor", partial, 1.0),))
    if kind == "default":
        return _Rope(int(theta))
    factor = parameters.get("factor")
    if (
        not isinstance(factor, int | float)
        or not 1 <= factor < math.inf
        or (kind == "linear" and factor % 1)
    ):
        expected = "a whole number" if kind == "linear" else "a number of at least 1"
        raise UserError(
            f"{source} has the factor {factor!r} of {kind!r} rope scaling, not {expected}"
        )
    if kind == "linear":
        return _Rope(int(theta), linear_factor=int(factor))
    _require(source, ((n, parameters.get(n), value) for n, value in _LLAMA3_SCALING.items()))
    return _Rope(int(theta), llama3_factor=float(factor))


def _rope_parameters(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """`rope_parameters`, which transformers 5 writes, or `rope_scaling` of earlier releases."""
    old, new = (_typed(config, name, dict, source) for name in ("rope_scaling", "rope_parameters"))
    if any(old[name] != new[name] for name in old.keys() & new.keys()):
        raise UserError(
            f"{source} has other rope_parameters than rope_scaling; keep those of the model"
        )
    parameters = {**old, **new}
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            raise UserError(f"{source} has RoPE's parameters {name!r} for some layers only")
    return parameters


def config_from_args(
    args: Mapping[str, Any], *, vocabulary: int, dtype: str, source: str
) -> dict[str, Any]:
    """config.json of a checkpoint's model, in the keys that every release of transformers reads.

    `args` are the checkpoint's, `vocabulary` the embedding's rows to export, `dtype` that of the
    weights. `hidden_dropout`, which only training uses, has no key. Raises UserError unless the
    model is a LLaMA or a Qwen2, naming every flag that makes it another, and KeyError for a missing
    argument.
    """
    spelled = spellings(build_parser())
    args = completed(args, spelled)
    unsupported = [name for name, value in _FIXED_ARGS.items() if args[name] != value]
    if args["use_rope_scaling"] and args["rotary_seq_len_interpolation_factor"] is not None:
        unsupported += ["use_rope_scaling", "rotary_seq_len_interpolation_factor"]
    if unsupported:
        flags = ", ".join(f"{spelled[n].option} ({spelled[n].word(args[n])})" for n in unsupported)
        raise UserError(
            f"{source} is neither a LLaMA nor a Qwen2, because of {flags}; only those can be "
            "converted"
        )
    if dtype not in _DTYPES:
        raise UserError(f"{source} holds weights in {dtype}; use one of {', '.join(_DTYPES)}")
    kind = "qwen2" if args["add_qkv_bias"] else "llama"
    heads = args["num_attention_heads"]
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_act": "silu",
        "hidden_size": args["hidden_size"],
        "intermediate_size": args["ffn_hidden_size"],
        "num_hidden_layers": args["num_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": args["num_query_groups"] if args["group_query_attention"] else heads,
        "head_dim": args["kv_channels"],
        "max_position_embeddings": args["max_position_embeddings"],
        "rms_norm_eps": args["layernorm_epsilon"],
        "rope_theta": float(args["rotary_base"]),
        "rope_scaling": _rope_scaling(args),
        "tie_word_embeddings": not args["untie_embeddings_and_output_weights"],
        "vocab_size": vocabulary,
        "torch_dtype": dtype,
        "attention_dropout": args["attention_dropout"],
        "use_cache": True,
    }
    if kind == "llama":
        return config | {"attention_bias": False, "mlp_bias": False}
    return config | {"use_sliding_window": False}


def _rope_scaling(args: Mapping[str, Any]) -> dict[str, Any] | None:
    if args["use_rope_scaling"]:
        factor = float(args["rope_scaling_factor"])
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3_SCALING}
    if args["rotary_seq_len_interpolation_factor"] is not None:
        factor = float(args["rotary_seq_len_interpolation_factor"])
        # Releases before 4.43 read `type`.
        return {"rope_type": "linear", "type": "linear", "factor": factor}
    return None
