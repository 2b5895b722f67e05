"""Converts Hugging Face's config.json to our arguments and back. No torch.

Settings that the other side cannot express are refused by name, because the model could otherwise
load and compute something else. A key that transformers does not read in this family changes
nothing there, and is not read here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero.errors import UserError
from hetero.text import counted
from megatron.hetero.arguments.parser import build_parser
from megatron.hetero.checkpoint.model_flags import Spelling, completed, spellings
from megatron.hetero.huggingface.config_reader import ConfigReader
from megatron.hetero.huggingface.experts import (
    expert_args,
    expert_keys,
    foreign_expert_args,
    untold_expert_args,
)
from megatron.hetero.huggingface.families import FAMILIES, Family, names_of_all
from megatron.hetero.huggingface.latent_attention import (
    foreign_latent_args,
    latent_args,
    latent_keys,
)
from megatron.hetero.huggingface.positions import (
    SCALING_FLAGS,
    foreign_rope_args,
    rope_args,
    rope_keys,
    scaling_kind,
)

_DTYPES = ("float32", "bfloat16", "float16")


def args_from_config(config: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Our arguments of the model, by destination.

    `padded_vocab_size` and `vocab_size` are the rows of the embedding. Raises UserError, which
    names `source` and every setting that we have no flag for.
    """
    read = ConfigReader(config, source)
    args = {
        **read.family.fixed,
        **_settings(read),
        **_sizes(read),
        **latent_args(read),
        **rope_args(read),
        **expert_args(read),
        "make_vocab_size_divisible_by": 128,
        "layernorm_epsilon": read.number("rms_norm_eps", 1e-6, above_zero=True, below=1),
        "untie_embeddings_and_output_weights": not read.value("tie_word_embeddings", False),
        "bias_gelu_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": read.number("attention_dropout", 0.0, below=1),
    }
    _require_supported(read)
    _require_no_window(read, args["max_position_embeddings"])
    if read.problems:
        raise UserError(*(f"{source} has {problem}" for problem in read.problems))
    return args


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises UserError."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is missing; name a folder in Hugging Face's format") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check it") from error
    except ValueError as error:
        raise UserError(f"{path} is truncated or not JSON; download it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object; download it again")
    return value


def _settings(config: ConfigReader) -> dict[str, float]:
    """The family's own arguments; all are factors, and 1 by default."""
    return {
        argument: config.number(key, 1.0, above_zero=True)
        for argument, key in config.family.settings.items()
        if argument != "rotary_percent"
    }


def _sizes(config: ConfigReader) -> dict[str, Any]:
    """The arguments that determine the shapes of tensors."""
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    groups = heads
    if config.value("num_key_value_heads") is not None:
        groups = config.size("num_key_value_heads")
    if heads % groups:
        config.problems.append(
            f"{counted(heads, 'attention head')} for {counted(groups, 'key-value head')}"
        )
    width = hidden // heads
    if config.value("head_dim") is not None and not config.family.latent_attention:
        width = config.size("head_dim")
    elif not width and config.has_sizes("num_attention_heads", "hidden_size"):
        config.problems.append(f"{counted(heads, 'attention head')} for a hidden_size of {hidden}")
    rows = config.size("vocab_size")
    return {
        "num_layers": config.size("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": config.size("intermediate_size"),
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "kv_channels": width,
        "max_position_embeddings": config.size("max_position_embeddings"),
        "vocab_size": rows,
        "padded_vocab_size": rows,
    }


def _require_supported(config: ConfigReader) -> None:
    """Collect the keys whose values change the model and have no flag."""
    config.require("hidden_act", config.value("hidden_act") or "silu", "silu")
    for name, supported in config.family.required.items():
        value = config.value(name, supported)
        # Older releases wrote null for a switch that is off.
        is_default = value is None and supported is not True
        config.require(name, supported if is_default else value, supported)
    further = config.family.further_tokens
    if further is not None and config.value(further) is not None:
        config.size(further, minimum=0)
    config.require("quantization_config", config.value("quantization_config") or None, None)
    code = config.typed("auto_map", dict).get("AutoModelForCausalLM")
    # The model may come with code for the family's class, from before transformers had it.
    if code is not None and str(code).rpartition(".")[2] != config.family.architecture:
        config.problems.append(
            f"auto_map {code!r}, code of its own, which may compute anything; only "
            f"{config.family.architecture} can be converted"
        )


def _require_no_window(config: ConfigReader, positions: int) -> None:
    """Collect a sliding window that hides tokens within the model's positions."""
    switch = config.family.windows
    layers = [layer for layer in config.typed("layer_types", list) if layer != "full_attention"]
    on = switch == "always" or (switch == "switched" and bool(config.value("use_sliding_window")))
    window = config.value("sliding_window") if on else None
    if window is not None and not isinstance(window, int):
        config.problems.append(f"sliding_window {window!r} instead of a whole number")
    elif window is not None and window < positions:
        config.problems.append(
            f"sliding_window {window}, less than its max_position_embeddings {positions}: a "
            "token does not see those further back, for which this program has no flag; only "
            "a window of at least max_position_embeddings, or null, can be converted"
        )
    elif window is None and layers:
        config.require("layer_types", layers[0], "full_attention")


def config_from_args(
    args: Mapping[str, Any],
    *,
    vocabulary: int,
    dtype: str,
    source: str,
    preferred: str | None = None,
) -> dict[str, Any]:
    """config.json of a checkpoint's model, in the keys that every release of transformers reads.

    `args` are the checkpoint's, `vocabulary` the embedding's rows to export, `dtype` that of the
    weights; `preferred` is a model_type for a model of several families (a LLaMA may also be a
    Mistral). What only training uses and has no key is left out, see `untold_args`. Raises
    UserError unless the model is of a family, naming every flag that makes it another, and KeyError
    for a missing argument.
    """
    args = completed(args, spellings(build_parser()))
    family = _family_of_args(args, source=source, preferred=preferred)
    if dtype not in _DTYPES:
        raise UserError(f"{source} holds weights in {dtype}; use one of {', '.join(_DTYPES)}")
    heads = args["num_attention_heads"]
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "hidden_size": args["hidden_size"],
        "intermediate_size": args["ffn_hidden_size"],
        "num_hidden_layers": args["num_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": args["num_query_groups"] if args["group_query_attention"] else heads,
        "max_position_embeddings": args["max_position_embeddings"],
        "rms_norm_eps": args["layernorm_epsilon"],
        **rope_keys(args),
        "tie_word_embeddings": not args["untie_embeddings_and_output_weights"],
        "vocab_size": vocabulary,
        "torch_dtype": dtype,
        "attention_dropout": args["attention_dropout"],
        "use_cache": True,
        # Replaced by the tokenizer's ids; without null, a family's own defaults would apply.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **family.required,
        **expert_keys(args, family),
        **(latent_keys(args) if family.latent_attention else {"head_dim": args["kv_channels"]}),
    }
    if family.further_tokens is not None:
        config[family.further_tokens] = 0
    for argument, key in family.settings.items():
        config[key] = args[argument]
    if config.get("attention_multiplier", 1.0) is None:
        config["attention_multiplier"] = args["kv_channels"] ** -0.5
    if family.windows == "switched":
        config["use_sliding_window"] = False
    elif family.windows == "always":
        config["sliding_window"] = None
    return config


def untold_args(args: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """The flags of a checkpoint that config.json has no key for, because only training uses them.

    Each with its value, as on a command line.
    """
    spelled = spellings(build_parser())
    args = completed(args, spelled)
    names = ["hidden_dropout"] if args["hidden_dropout"] else []
    names += untold_expert_args(args, family)
    return tuple(str(spelled[name].typed(args[name])) for name in names)


def _family_of_args(args: Mapping[str, Any], *, source: str, preferred: str | None) -> Family:
    """The family that the arguments describe: of several, `preferred` or else the first."""
    spelled = spellings(build_parser())
    mixes = args["num_experts"] is not None
    families = [family for family in FAMILIES if (family.experts is not None) == mixes]
    foreign = {
        family.model_type: [n for n, value in family.fixed.items() if _plain(args, n) != value]
        for family in families
    }
    for family in families:
        if scaling_kind(args) not in family.scalings:
            foreign[family.model_type].append(SCALING_FLAGS[scaling_kind(args)])
        foreign[family.model_type] += foreign_rope_args(args)
        foreign[family.model_type] += foreign_latent_args(args, family)
        foreign[family.model_type] += foreign_expert_args(args, family)
    fitting = [family for family in families if not foreign[family.model_type]]
    if fitting:
        return next((f for f in fitting if f.model_type == preferred), fitting[0])
    nearest = min(families, key=lambda f: (len(foreign[f.model_type]), f.model_type != preferred))
    raise UserError(
        f"{source} does not belong to a family that can be converted, because of "
        f"{_flags(foreign[nearest.model_type], args, spelled)}; those that can are {names_of_all()}"
    )


def _plain(args: Mapping[str, Any], name: str) -> Any:
    """An argument. A softmax scale that equals the default counts as not given."""
    if name == "softmax_scale" and args[name] == args["kv_channels"] ** -0.5:
        return None
    return args[name]


def _flags(names: list[str], args: Mapping[str, Any], spelled: Mapping[str, Spelling]) -> str:
    return ", ".join(f"{spelled[n].option} ({spelled[n].word(args[n])})" for n in names)
