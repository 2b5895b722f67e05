"""RoPE in a config.json and in our arguments. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.hetero.huggingface.config_reader import ConfigReader

# megatron-core implements --use-rope-scaling with these numbers only.
_LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# It implements yarn with these alone.
_YARN = {
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "truncate": True,
    "attention_factor": None,
}
_YARN_WRITTEN = ("original_max_position_embeddings", "beta_fast", "beta_slow")
_DEFAULT_SCALING_FACTOR = 8.0
_DEFAULT_ROPE_THETA = 10000.0
_OLD_SCALINGS = {"su": "longrope"}

SCALING_FLAGS = {
    "linear": "rotary_seq_len_interpolation_factor",
    "llama3": "use_rope_scaling",
    "yarn": "rope_type",
}
"""The argument that turns on each of RoPE's scalings."""


def rope_args(config: ConfigReader) -> dict[str, Any]:
    """The arguments of rotary position embeddings."""
    parameters = _parameters(config)
    theta = parameters.get("rope_theta", config.value("rope_theta", _DEFAULT_ROPE_THETA))
    theta = config.checked_number("rope_theta", theta, _DEFAULT_ROPE_THETA, above_zero=True)
    if theta != int(theta):
        config.problems.append(f"rope_theta {theta}, and --rotary-base takes whole numbers")
    args: dict[str, Any] = {
        "rotary_base": int(theta),
        "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": False,
        "rope_scaling_factor": _DEFAULT_SCALING_FACTOR,
        **_rotated(config, parameters),
    }
    if config.family.latent_attention:
        args |= {
            "rope_type": "rope",
            "rotary_scaling_factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
        }
    kind = parameters.get("rope_type", parameters.get("type")) or "default"
    if kind not in config.family.scalings:
        known = " and ".join(repr(name) for name in config.family.scalings if name != "default")
        config.problems.append(
            f"the rope scaling {_OLD_SCALINGS.get(str(kind), kind)!r}, for which this program has "
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
        config.problems.append(f"the factor {factor!r} of {kind!r} rope scaling, not {expected}")
        return args
    if kind == "linear":
        return args | {"rotary_seq_len_interpolation_factor": int(factor)}
    if kind == "yarn":
        return args | _yarn_args(config, parameters, float(factor))
    for name, supported in _LLAMA3_SCALING.items():
        config.require(name, parameters.get(name), supported)
    return args | {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}


def _yarn_args(
    config: ConfigReader, parameters: Mapping[str, Any], factor: float
) -> dict[str, Any]:
    """The arguments of yarn with a factor."""
    name = "original_max_position_embeddings"
    original = config.value(name, config.value("max_position_embeddings"))
    for key, supported in _YARN.items():
        default = original if key == name else supported
        value = parameters.get(key, default)
        config.require(key, supported if value is None and key != name else value, supported)
    scales = {
        key: config.checked_number(key, parameters.get(key) or 0.0, 0.0)
        for key in ("mscale", "mscale_all_dim")
    }
    if not scales["mscale_all_dim"] and scales["mscale"] in (0.0, 1.0):
        # transformers takes 1 for what is rotated.
        scales["mscale"] = 1.0
    elif not all(scales.values()):
        said = " and ".join(f"{key} {value:g}" for key, value in scales.items())
        config.problems.append(f"{said} of 'yarn' rope scaling; only both above 0 can be converted")
    return {"rope_type": "yarn", "rotary_scaling_factor": factor, **scales}


def _rotated(config: ConfigReader, parameters: Mapping[str, Any]) -> dict[str, float]:
    """--rotary-percent, where the family may rotate a part of each head."""
    name = "partial_rotary_factor"
    part = parameters.get(name, config.value(name, 1.0))
    if "rotary_percent" not in config.family.settings:
        config.require(name, part, 1.0)
        return {}
    part = config.checked_number(name, part, 1.0, above_zero=True)
    if part > 1:
        config.problems.append(f"{name} {part}, more than the whole head")
    return {"rotary_percent": part}


def _parameters(config: ConfigReader) -> dict[str, Any]:
    """`rope_parameters`, which transformers 5 writes, or `rope_scaling` of earlier releases."""
    old, new = (config.typed(name, dict) for name in ("rope_scaling", "rope_parameters"))
    if any(old[name] != new[name] for name in old.keys() & new.keys()):
        config.problems.append("other rope_parameters than rope_scaling; keep those of the model")
    parameters = {**old, **new}
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            config.problems.append(f"RoPE's parameters {name!r} for some layers only")
    return parameters


def scaling_kind(args: Mapping[str, Any]) -> str:
    """The scaling that the arguments describe, as config.json names it."""
    if args["multi_latent_attention"]:
        stretched = args["rope_type"] == "yarn" and args["rotary_scaling_factor"] != 1.0
        return "yarn" if stretched else "default"
    if args["use_rope_scaling"]:
        return "llama3"
    return "default" if args["rotary_seq_len_interpolation_factor"] is None else "linear"


def foreign_rope_args(args: Mapping[str, Any]) -> Iterator[str]:
    """The arguments of positions that no config.json has keys for."""
    kind = scaling_kind(args)
    if kind == "llama3" and args["rotary_seq_len_interpolation_factor"] is not None:
        yield "use_rope_scaling"
        yield "rotary_seq_len_interpolation_factor"
    if kind == "yarn":
        if args["rotary_scaling_factor"] < 1:
            yield "rotary_scaling_factor"
        # transformers reads both or takes mscale for 1.
        if not args["mscale"] or (not args["mscale_all_dim"] and args["mscale"] != 1.0):
            yield "mscale"


def rope_keys(args: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json, in the form that every release of transformers reads."""
    return {"rope_theta": float(args["rotary_base"]), "rope_scaling": _scaling(args)}


def _scaling(args: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = scaling_kind(args)
    # Releases before 4.43 read `type`.
    named = {"rope_type": kind, "type": kind}
    if kind == "llama3":
        factor = float(args["rope_scaling_factor"])
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3_SCALING}
    if kind == "linear":
        return {**named, "factor": float(args["rotary_seq_len_interpolation_factor"])}
    if kind == "yarn":
        scales = {name: args[name] for name in ("mscale", "mscale_all_dim")}
        return {
            **named,
            "factor": float(args["rotary_scaling_factor"]),
            **(scales if args["mscale_all_dim"] else {}),
            **{name: _YARN[name] for name in _YARN_WRITTEN},
        }
    return None
