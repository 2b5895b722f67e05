"""The arguments in Megatron-LM's checkpoints, and ours: the same flags, some under other names.

What our model does not compute is refused by name, because a model that means something else would
load without a word. No torch.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from hetero.errors import UserError
from megatron.training.arguments.parser import build_parser
from megatron.training.checkpoint.model_flags import COMPARED, MODEL_FLAGS, spellings

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
# Files, and what is another in every run.
_NOT_OURS = (
    *("rank", "local_rank", "load", "save", "pretrained_checkpoint", "ckpt_step", "finetune"),
    *("use_checkpoint_args", "data_path", "data_cache_path", "tensorboard_dir", "wandb_project"),
    *("exit_interval", "exit_duration_in_mins", "attention_backend", "ckpt_format"),
    *("exit_signal", "ignored_flags", "typed_flags", "taken_flags"),
)


def _is_set(value: Any) -> bool:
    return value not in (None, False, 0, "", [], ())


def _unless(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in allowed


# What decides a model's output, no tensor of it shows, or only in tensors of other names.
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
    "softmax_scale": ("--softmax-scale", _is_set),
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


def to_ours(namespace: Namespace, *, source: str) -> dict[str, Any]:
    """Our arguments of the model and its run, by destination. Raises UserError, naming every flag
    of a model that we do not compute.
    """
    theirs = _modern(vars(namespace))
    missing = [name for name in _REQUIRED if theirs.get(name) is None]
    if missing:
        raise UserError(
            f"{source} does not say {', '.join(missing)}, without which its model is unknown; save "
            "it again with a version of Megatron-LM that stores its arguments"
        )
    wrong = [
        f"{flag} {theirs[name]}"
        for name, (flag, is_refused) in _REFUSED.items()
        if is_refused(theirs.get(name))
    ]
    if theirs["position_embedding_type"] not in ("learned_absolute", "rope", "none"):
        wrong.append(f"--position-embedding-type {theirs['position_embedding_type']}")
    if theirs["normalization"] not in ("LayerNorm", "RMSNorm"):
        wrong.append(f"--normalization {theirs['normalization']}")
    if wrong:
        raise UserError(
            f"{source} is of a model that is not computed here, because of {', '.join(wrong)}; "
            "only dense GPT models can be converted"
        )
    known = vars(build_parser().parse_args([]))
    return {
        name: value
        for name, value in theirs.items()
        if (name in known or name in _DERIVED) and name not in _NOT_OURS and _is_plain(value)
    }


_DERIVED = (
    *("padded_vocab_size", "consumed_train_samples", "consumed_valid_samples"),
    *("skipped_train_samples", "params_dtype", "vocab_size"),
)


def _modern(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Under the names of today, with every flag that decides the model."""
    theirs = {name: value for name, value in stored.items() if value is not None}
    for name, older in (
        ("layernorm_epsilon", "norm_epsilon"),
        ("layernorm_zero_centered_gamma", "apply_layernorm_1p"),
        ("tensor_model_parallel_size", "model_parallel_size"),
    ):
        if older in theirs:
            theirs.setdefault(name, theirs[older])
    if "disable_bias_linear" in theirs:
        theirs.setdefault("add_bias_linear", not theirs["disable_bias_linear"])
    if theirs.get("use_rotary_position_embeddings"):
        theirs["position_embedding_type"] = "rope"
    elif (
        theirs.get("add_position_embedding") is False
        and theirs.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    ):
        theirs["position_embedding_type"] = "none"
    theirs = {**_defaults(), **theirs}
    hidden, heads = theirs.get("hidden_size"), theirs.get("num_attention_heads")
    if hidden and heads:
        theirs.setdefault("kv_channels", hidden // heads)
        theirs.setdefault("ffn_hidden_size", 4 * hidden)
    theirs["params_dtype"] = str(theirs.get("params_dtype", "float32")).removeprefix("torch.")
    return theirs


def _defaults() -> dict[str, Any]:
    """What Megatron-LM takes for a flag of the model that an older version did not know."""
    found = spellings(build_parser())
    return {
        name: spelling.default
        for name, spelling in found.items()
        if MODEL_FLAGS[name].kind in COMPARED and spelling.default is not None
    }


def to_theirs(
    args: Mapping[str, Any], *, tensor: int, pipeline: int, virtual: int | None, **derived: Any
) -> Namespace:
    """Megatron-LM's arguments of one of our checkpoints, under today's names and the older ones.

    `derived` goes in as it is: what Megatron-LM computes from the flags.
    """
    kept = {
        name: value
        for name, value in (vars(build_parser().parse_args([])) | dict(args)).items()
        if not name.startswith(("hetero", "tokenizer_digest")) and name not in _NOT_OURS
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


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
