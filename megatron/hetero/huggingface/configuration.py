"""Reads Hugging Face's config.json and converts it to our arguments and back. No torch.

Settings that the other side cannot express are refused by name, because the model could otherwise
load and compute something else. A key that transformers does not read in this family changes
nothing there, and is not read here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from hetero.errors import UserError
from hetero.text import counted
from megatron.hetero.arguments.parser import build_parser
from megatron.hetero.checkpoint.model_flags import (
    Spelling,
    completed,
    require_dense,
    spellings,
)
from megatron.hetero.huggingface.families import BY_TYPE, FAMILIES, Family, names_of_all

# megatron-core implements --use-rope-scaling with these numbers only.
_LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_DEFAULT_SCALING_FACTOR = 8.0
_DEFAULT_ROPE_THETA = 10000.0
_OLD_SCALINGS = {"su": "longrope"}
_JSON_NAMES: Mapping[type, str] = {list: "list", dict: "mapping"}
_DTYPES = ("float32", "bfloat16", "float16")
T = TypeVar("T")


def args_from_config(config: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Our arguments of the model, by destination.

    `padded_vocab_size` and `vocab_size` are the rows of the embedding. Raises UserError, which
    names `source` and every setting that we have no flag for.
    """
    read = _Config(config, source)
    args = {
        **read.family.fixed,
        **read.settings(),
        **read.sizes(),
        **read.rope(),
        "make_vocab_size_divisible_by": 128,
        "layernorm_epsilon": read.number("rms_norm_eps", 1e-6, above_zero=True),
        "untie_embeddings_and_output_weights": not read.value("tie_word_embeddings", False),
        "bias_gelu_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": read.number("attention_dropout", 0.0),
    }
    read.require_supported()
    read.require_no_window(args["max_position_embeddings"])
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


class _Config:
    """Reads config.json, and collects what is wrong or not supported in `problems`."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self._source = source
        self._given = config
        self.problems: list[str] = []
        self.family = self._family()

    def value(self, name: str, default: Any = None) -> Any:
        """The value of a key; `default`, or the family's own, if the key is missing."""
        value = self._given.get(name, _MISSING)
        return self.family.defaults.get(name, default) if value is _MISSING else value

    def number(self, name: str, default: float, *, above_zero: bool = False) -> float:
        value = self.value(name, default)
        if value is None and name == "attention_dropout":
            return default
        return self._checked_number(name, value, default, above_zero=above_zero)

    def settings(self) -> dict[str, float]:
        """The family's own arguments; all are factors, and 1 by default."""
        return {
            argument: self.number(key, 1.0, above_zero=True)
            for argument, key in self.family.settings.items()
            if argument != "rotary_percent"
        }

    def sizes(self) -> dict[str, Any]:
        """The arguments that determine the shapes of tensors."""
        heads, hidden = self._size("num_attention_heads"), self._size("hidden_size")
        groups = heads
        if self.value("num_key_value_heads") is not None:
            groups = self._size("num_key_value_heads")
        if heads % groups:
            self.problems.append(
                f"{counted(heads, 'attention head')} for {counted(groups, 'key-value head')}"
            )
        width = hidden // heads if self.value("head_dim") is None else self._size("head_dim")
        rows = self._size("vocab_size")
        return {
            "num_layers": self._size("num_hidden_layers"),
            "hidden_size": hidden,
            "ffn_hidden_size": self._size("intermediate_size"),
            "num_attention_heads": heads,
            "group_query_attention": groups != heads,
            "num_query_groups": groups if groups != heads else 1,
            "kv_channels": width,
            "max_position_embeddings": self._size("max_position_embeddings"),
            "vocab_size": rows,
            "padded_vocab_size": rows,
        }

    def rope(self) -> dict[str, Any]:
        """The arguments of rotary position embeddings."""
        parameters = self._rope_parameters()
        theta = parameters.get("rope_theta", self.value("rope_theta", _DEFAULT_ROPE_THETA))
        theta = self._checked_number("rope_theta", theta, _DEFAULT_ROPE_THETA, above_zero=True)
        if theta != int(theta):
            self.problems.append(f"rope_theta {theta}, and --rotary-base takes whole numbers")
        args = {
            "rotary_base": int(theta),
            "rotary_seq_len_interpolation_factor": None,
            "use_rope_scaling": False,
            "rope_scaling_factor": _DEFAULT_SCALING_FACTOR,
            **self._rotated(parameters),
        }
        kind = parameters.get("rope_type", parameters.get("type")) or "default"
        if kind not in self.family.scalings:
            known = " and ".join(repr(name) for name in self.family.scalings if name != "default")
            self.problems.append(
                f"the rope scaling {_OLD_SCALINGS.get(kind, kind)!r}, for which this program has "
                f"no flag; only {known or 'a model without one'} can be converted"
            )
            return args
        if kind == "default":
            return args
        factor = parameters.get("factor")
        if (
            not isinstance(factor, int | float)
            or not 1 <= factor < math.inf
            or (kind == "linear" and factor % 1)
        ):
            expected = "a whole number" if kind == "linear" else "a number of at least 1"
            self.problems.append(f"the factor {factor!r} of {kind!r} rope scaling, not {expected}")
            return args
        if kind == "linear":
            return args | {"rotary_seq_len_interpolation_factor": int(factor)}
        for name, supported in _LLAMA3_SCALING.items():
            self._require(name, parameters.get(name), supported)
        return args | {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}

    def require_supported(self) -> None:
        """Collect the keys whose values change the model and have no flag."""
        self._require("hidden_act", self.value("hidden_act") or "silu", "silu")
        for name, supported in self.family.required.items():
            # Older releases wrote null for a switch that is off.
            self._require(name, self.value(name) or supported, supported)
        self._require("quantization_config", self.value("quantization_config") or None, None)
        code = self._typed("auto_map", dict).get("AutoModelForCausalLM")
        # The model may come with code for the family's class, from before transformers had it.
        if code is not None and str(code).rpartition(".")[2] != self.family.architecture:
            self.problems.append(
                f"auto_map {code!r}, code of its own, which may compute anything; only "
                f"{self.family.architecture} can be converted"
            )

    def require_no_window(self, positions: int) -> None:
        """Collect a sliding window that hides tokens within the model's positions."""
        switch = self.family.windows
        layers = [layer for layer in self._typed("layer_types", list) if layer != "full_attention"]
        on = switch == "always" or (switch == "switched" and bool(self.value("use_sliding_window")))
        window = self.value("sliding_window") if on else None
        if window is not None and not isinstance(window, int):
            self.problems.append(f"sliding_window {window!r} instead of a whole number")
        elif window is not None and window < positions:
            self.problems.append(
                f"sliding_window {window}, less than its max_position_embeddings {positions}: a "
                "token does not see those further back, for which this program has no flag; only "
                "a window of at least max_position_embeddings, or null, can be converted"
            )
        elif window is None and layers:
            self._require("layer_types", layers[0], "full_attention")

    def _family(self) -> Family:
        kind = str(self._given.get("model_type"))
        family = BY_TYPE.get(kind)
        architectures = self._given.get("architectures") or []
        if not isinstance(architectures, list):
            raise UserError(
                f"{self._source} has architectures {architectures!r} instead of a list; take the "
                "model's own config.json"
            )
        if family is None or architectures not in ([], [family.architecture]):
            name = ", ".join(map(str, architectures)) if family else f"{kind!r}"
            known = [each.architecture for each in FAMILIES]
            raise UserError(
                f"{self._source} is of the architecture {name}, which cannot be converted; those "
                f"that can are {', '.join(known[:-1])} and {known[-1]}"
            )
        return family

    def _rotated(self, parameters: Mapping[str, Any]) -> dict[str, float]:
        """--rotary-percent, where the family may rotate a part of each head."""
        name = "partial_rotary_factor"
        part = parameters.get(name, self.value(name, 1.0))
        if "rotary_percent" not in self.family.settings:
            self._require(name, part, 1.0)
            return {}
        part = self._checked_number(name, part, 1.0, above_zero=True)
        if part > 1:
            self.problems.append(f"{name} {part}, more than the whole head")
        return {"rotary_percent": part}

    def _rope_parameters(self) -> dict[str, Any]:
        """`rope_parameters`, which transformers 5 writes, or `rope_scaling` of earlier releases."""
        old, new = (self._typed(name, dict) for name in ("rope_scaling", "rope_parameters"))
        if any(old[name] != new[name] for name in old.keys() & new.keys()):
            self.problems.append("other rope_parameters than rope_scaling; keep those of the model")
        parameters = {**old, **new}
        for name, value in parameters.items():
            if isinstance(value, Mapping):
                self.problems.append(f"RoPE's parameters {name!r} for some layers only")
        return parameters

    def _typed(self, name: str, kind: type[T]) -> T:
        """The value of a key, which must be of a type; an empty one if it is missing or null."""
        value = self.value(name) or kind()
        if isinstance(value, kind):
            return value
        self.problems.append(
            f"{name} {value!r} instead of a {_JSON_NAMES[kind]}; take the model's own config.json"
        )
        return kind()

    def _size(self, name: str) -> int:
        value = self.value(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        problem = f"{name} {value!r} instead of a whole number; take the model's own config.json"
        if problem not in self.problems:
            self.problems.append(problem)
        return 1

    def _checked_number(
        self, name: str, value: Any, default: float, *, above_zero: bool = False
    ) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and 0 <= value < math.inf and (value or not above_zero):
            return float(value)
        expected = "a number above 0" if above_zero else "a number of at least 0"
        self.problems.append(
            f"{name} {value!r} instead of {expected}; take the model's own config.json"
        )
        return default

    def _require(self, name: str, value: Any, supported: Any) -> None:
        if value != supported:
            self.problems.append(
                f"{name} {value!r}, for which this program has no flag; only {supported!r} can be "
                "converted"
            )


_MISSING = object()


def _family_of_args(args: Mapping[str, Any], *, source: str, preferred: str | None) -> Family:
    """The family that the arguments describe: of several, `preferred` or else the first."""
    spelled = spellings(build_parser())
    foreign = {
        family.model_type: [n for n, value in family.fixed.items() if _plain(args, n) != value]
        for family in FAMILIES
    }
    if args["use_rope_scaling"] and args["rotary_seq_len_interpolation_factor"] is not None:
        for names in foreign.values():
            names += ["use_rope_scaling", "rotary_seq_len_interpolation_factor"]
    for family in FAMILIES:
        if _scaling_kind(args) not in family.scalings:
            foreign[family.model_type].append(_SCALING_FLAGS[_scaling_kind(args)])
    fitting = [family for family in FAMILIES if not foreign[family.model_type]]
    if fitting:
        return next((f for f in fitting if f.model_type == preferred), fitting[0])
    nearest = min(FAMILIES, key=lambda family: len(foreign[family.model_type]))
    raise UserError(
        f"{source} does not belong to a family that can be converted, because of "
        f"{_flags(foreign[nearest.model_type], args, spelled)}; those that can are {names_of_all()}"
    )


_SCALING_FLAGS = {
    "linear": "rotary_seq_len_interpolation_factor",
    "llama3": "use_rope_scaling",
}


def _scaling_kind(args: Mapping[str, Any]) -> str:
    if args["use_rope_scaling"]:
        return "llama3"
    return "default" if args["rotary_seq_len_interpolation_factor"] is None else "linear"


def _plain(args: Mapping[str, Any], name: str) -> Any:
    """An argument. A softmax scale that equals the default counts as not given."""
    if name == "softmax_scale" and args[name] == args["kv_channels"] ** -0.5:
        return None
    return args[name]


def _flags(names: list[str], args: Mapping[str, Any], spelled: Mapping[str, Spelling]) -> str:
    return ", ".join(f"{spelled[n].option} ({spelled[n].word(args[n])})" for n in names)


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
    Mistral). `hidden_dropout`, which only training uses, has no key. Raises UserError unless the
    model is of a family, naming every flag that makes it another, and KeyError for a missing
    argument.
    """
    require_dense(args, source=source)
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
        # Replaced by the tokenizer's ids; without null, a family's own defaults would apply.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **family.required,
    }
    for argument, key in family.settings.items():
        config[key] = args[argument]
    if config.get("attention_multiplier", 1.0) is None:
        config["attention_multiplier"] = args["kv_channels"] ** -0.5
    if family.windows == "switched":
        config["use_sliding_window"] = False
    elif family.windows == "always":
        config["sliding_window"] = None
    return config


def _rope_scaling(args: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = _scaling_kind(args)
    if kind == "llama3":
        factor = float(args["rope_scaling_factor"])
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3_SCALING}
    if kind == "linear":
        factor = float(args["rotary_seq_len_interpolation_factor"])
        # Releases before 4.43 read `type`.
        return {"rope_type": "linear", "type": "linear", "factor": factor}
    return None
