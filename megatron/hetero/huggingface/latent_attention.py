"""Multi-latent attention in a config.json and in our arguments. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.hetero.huggingface.config_reader import ConfigReader
from megatron.hetero.huggingface.families import Family

_WIDTHS = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Our arguments and the keys of config.json with the same value."""

LATENT_EPSILON = 1e-6
"""What transformers adds in the norms of latent vectors, whatever rms_norm_eps says."""


def latent_args(config: ConfigReader) -> dict[str, Any]:
    """The arguments of multi-latent attention, but for its positions; none for other attention."""
    if not config.family.latent_attention:
        return {}
    heads = config.size("num_attention_heads")
    given = config.value("num_key_value_heads")
    config.require("num_key_value_heads", heads if given is None else given, heads)
    rank = config.value("q_lora_rank")
    rotated = config.size("qk_rope_head_dim")
    if rotated % 2:
        config.problems.append(f"qk_rope_head_dim {rotated}, of which pairs are rotated")
    config.require("rms_norm_eps", config.value("rms_norm_eps", LATENT_EPSILON), LATENT_EPSILON)
    return {
        "q_lora_rank": None if rank is None else config.size("q_lora_rank"),
        **{name: config.size(key) for name, key in _WIDTHS.items()},
        # Megatron's default, which latent attention does not use.
        "kv_channels": config.size("hidden_size") // heads,
        "group_query_attention": False,
        "num_query_groups": 1,
    }


def latent_keys(args: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json of multi-latent attention, but for its positions."""
    widths = {key: args[name] for name, key in _WIDTHS.items()}
    heads = args["num_attention_heads"]
    return {"q_lora_rank": args["q_lora_rank"], **widths, "num_key_value_heads": heads}


def foreign_latent_args(args: Mapping[str, Any], family: Family) -> Iterator[str]:
    """The arguments that make a latent attention another than a family's."""
    if family.latent_attention and args["layernorm_epsilon"] != LATENT_EPSILON:
        yield "layernorm_epsilon"
