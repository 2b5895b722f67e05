"""Converts the arguments in Megatron-LM's checkpoints to ours and back.

They are the same flags, some under other names. Flags of models that are not converted are
refused by name, because their checkpoints could otherwise load and compute something else. No
torch.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from hetero.errors import UserError
from megatron.hetero.arguments.parser import build_parser
from megatron.hetero.checkpoint.index import is_plain
from megatron.hetero.checkpoint.model_flags import (
    COMPARED,
    MODEL_FLAGS,
    spellings,
)

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
# Paths, and what differs from run to run.
_PER_RUN = (
    *("rank", "local_rank", "load", "save", "pretrained_checkpoint", "ckpt_step", "finetune"),
    *("use_checkpoint_args", "data_path", "data_cache_path", "tensorboard_dir", "wandb_project"),
    *("exit_interval", "exit_duration_in_mins", "attention_backend", "ckpt_format"),
    *("exit_signal", "ignored_flags", "typed_flags", "taken_flags"),
)


def _is_set(value: Any) -> bool:
    return value not in (None, False, 0, "", [], ())


def _unless(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in allowed


# Computed from the flags, by Megatron-LM or by us.
_DERIVED = (
    *("padded_vocab_size", "consumed_train_samples", "consumed_valid_samples"),
    *("skipped_train_samples", "params_dtype", "vocab_size"),
)
# Flags that change what a model computes, and whether a value does. Names and shapes of tensors
# would not show it.
_REFUSED: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "num_experts": ("--num-experts", _is_set),
    "multi_latent_attention": ("--multi-latent-attention", _is_set),
    "fp8": ("--fp8-format", _is_set),
    "fp4": ("--fp4-format", _is_set),
    "fp8_param_gather": ("--fp8-param-gather", _is_set),
    "fp4_param": ("--fp4-param-gather", _is_set),
    "mtp_num_layers": ("--mtp-num-layers", _is_set),
    "is_hybrid_model": ("--is-hybrid-model", _is_set),
    "hybrid_override_pattern": ("--hybrid-override-pattern", _is_set),
    "hybrid_layer_pattern": ("--hybrid-layer-pattern", _is_set),
    "hybrid_attention_ratio": ("--hybrid-attention-ratio", _is_set),
    "hybrid_mlp_ratio": ("--hybrid-mlp-ratio", _is_set),
    "spec": ("--spec", _is_set),
    "heterogeneous_layers_config_path": ("--heterogeneous-layers-config-path", _is_set),
    "heterogeneous_layers_config_encoded_json": (
        "--heterogeneous-layers-config-encoded-json",
        _is_set,
    ),
    "experimental_attention_variant": ("--experimental-attention-variant", _is_set),
    "linear_attention_type": ("--linear-attention-type", _is_set),
    "window_size": ("--window-size", _is_set),
    "no_rope_freq": ("--no-rope-freq", _is_set),
    "mrope_section": ("--mrope-section", _is_set),
    "rope_type": ("--rope-type", _unless("rope")),
    "qk_l2_norm": ("--qk-l2-norm", _is_set),
    "qk_clip": ("--qk-clip", _is_set),
    "attention_output_gate": ("--attention-output-gate", _is_set),
    "softmax_type": ("--softmax-type", _unless("vanilla")),
    "quick_geglu": ("--quick-geglu", _is_set),
    "openai_gelu": ("--openai-gelu", _is_set),
    "glu_linear_offset": ("--glu-linear-offset", _is_set),
    "activation_func_clamp_value": ("--activation-func-clamp-value", _is_set),
    "apply_residual_connection_post_layernorm": (
        "--apply-residual-connection-post-layernorm",
        _is_set,
    ),
    "retro_add_retriever": ("--retro-add-retriever", _is_set),
    "use_kitchen": ("--use-kitchen", _is_set),
    "te_precision_config_file": ("--te-precision-config-file", _is_set),
    "tokentype_size": ("token types", _is_set),
}


def args_from_namespace(namespace: Namespace, *, source: str) -> dict[str, Any]:
    """Our arguments of the model and its run, by destination, from Megatron-LM's `args`.

    Raises UserError, which names `source` and every flag that is missing or not implemented.
    """
    args = _with_current_names(vars(namespace))
    missing = [name for name in _REQUIRED if args.get(name) is None]
    if missing:
        raise UserError(
            f"{source} does not say {', '.join(missing)}, without which its model is unknown; save "
            "it again with a version of Megatron-LM that stores its arguments"
        )
    refused = [
        f"{flag} {args[name]}"
        for name, (flag, is_refused) in _REFUSED.items()
        if is_refused(args.get(name))
    ]
    if args["position_embedding_type"] not in ("learned_absolute", "rope", "none"):
        refused.append(f"--position-embedding-type {args['position_embedding_type']}")
    if args["normalization"] not in ("LayerNorm", "RMSNorm"):
        refused.append(f"--normalization {args['normalization']}")
    if refused:
        raise UserError(
            f"{source} is of a model that is not converted ({', '.join(refused)}); "
            "only dense GPT models are, without latent attention"
        )
    known = vars(build_parser().parse_args([]))
    return {
        name: value
        for name, value in args.items()
        if (name in known or name in _DERIVED)
        and name not in _PER_RUN
        and is_plain(value)
        # Of a dense model they say nothing, and not all have the types of our flags.
        and not name.startswith("moe_")
    }


def _with_current_names(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Stored arguments under Megatron-LM's current names, with defaults of flags they lack."""
    args = {name: value for name, value in stored.items() if value is not None}
    for name, older in (
        ("layernorm_epsilon", "norm_epsilon"),
        ("layernorm_zero_centered_gamma", "apply_layernorm_1p"),
        ("tensor_model_parallel_size", "model_parallel_size"),
    ):
        if older in args:
            args.setdefault(name, args[older])
    if "disable_bias_linear" in args:
        args.setdefault("add_bias_linear", not args["disable_bias_linear"])
    if args.get("use_rotary_position_embeddings"):
        args["position_embedding_type"] = "rope"
    elif (
        args.get("add_position_embedding") is False
        and args.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    ):
        args["position_embedding_type"] = "none"
    args = {**_defaults(), **args}
    hidden, heads = args.get("hidden_size"), args.get("num_attention_heads")
    if hidden and heads:
        args.setdefault("kv_channels", hidden // heads)
        args.setdefault("ffn_hidden_size", 4 * hidden)
    args["params_dtype"] = str(args.get("params_dtype", "float32")).removeprefix("torch.")
    return args


def _defaults() -> dict[str, Any]:
    """Defaults of the model's flags, which an older version of Megatron-LM may not have had."""
    return {
        name: spelling.default
        for name, spelling in spellings(build_parser()).items()
        if MODEL_FLAGS[name].kind in COMPARED and spelling.default is not None
    }


# Flags that change what a model computes, and that Megatron-LM does not have or is not written for.
_NOT_WRITTEN = (
    *("num_experts", "multi_latent_attention", "mtp_num_layers"),
    *("qk_layernorm_across_heads", "reordered_norm", "softmax_scale"),
    *("embedding_multiplier", "residual_multiplier", "logits_scaling"),
)


def require_expressible(args: Mapping[str, Any], *, source: str) -> None:
    """Raise UserError if the model is not written for Megatron-LM, naming every flag of it."""
    spelled = spellings(build_parser())
    foreign = [
        f"{spelled[name].option} ({spelled[name].word(args[name])})"
        for name in _NOT_WRITTEN
        if args.get(name, spelled[name].default) != spelled[name].default
    ]
    if foreign:
        raise UserError(
            f"{source} is of a model that is not written for Megatron-LM, because of "
            f"{', '.join(foreign)}; megatron-to-hf writes models of transformers' families"
        )


def namespace_from_args(
    args: Mapping[str, Any], *, tensor: int, pipeline: int, virtual: int | None, **derived: Any
) -> Namespace:
    """Megatron-LM's `args` of a checkpoint of ours, under current and older names.

    `args` are ours, by destination. `tensor`, `pipeline` and `virtual` are its parallel sizes;
    `derived` overrides what Megatron-LM computes from its flags.
    """
    kept = {
        name: value
        for name, value in (vars(build_parser().parse_args([])) | dict(args)).items()
        if not name.startswith(("hetero", "tokenizer_digest", "moe_", "mtp_"))
        and name not in _PER_RUN
    }
    return Namespace(
        **kept
        | {
            "norm_epsilon": args["layernorm_epsilon"],
            "apply_layernorm_1p": args["layernorm_zero_centered_gamma"],
            "disable_bias_linear": not args["add_bias_linear"],
            "use_rotary_position_embeddings": args["position_embedding_type"] == "rope",
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "virtual_pipeline_model_parallel_size": virtual,
            "expert_model_parallel_size": 1,
            "context_parallel_size": 1,
            "world_size": tensor * pipeline,
            "data_parallel_size": 1,
            "rank": 0,
            "num_experts": None,
            "multi_latent_attention": False,
            "fp8": None,
            **derived,
        }
    )
