"""Whether a checkpoint is one of this run's model. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero.errors import UserError
from megatron.training.checkpoint import folder as folders
from megatron.training.checkpoint.index import DamagedCheckpoint, read_index

# What decides the shape of some tensor: these must be equal for anything to be loaded.
SHAPE = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "num_query_groups": "--num-query-groups",
    "kv_channels": "--kv-channels",
    "swiglu": "--swiglu",
    "normalization": "--normalization",
    "add_bias_linear": "--disable-bias-linear",
    "add_qkv_bias": "--add-qkv-bias",
    "qk_layernorm": "--qk-layernorm",
    "position_embedding_type": "--position-embedding-type",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
}
# What decides what the weights mean: may change for fine-tuning, not in the middle of a run.
MEANING = {
    "squared_relu": "--squared-relu",
    "rotary_base": "--rotary-base",
    "rotary_percent": "--rotary-percent",
    "rotary_interleaved": "--rotary-interleaved",
    "use_rope_scaling": "--use-rope-scaling",
    "rope_scaling_factor": "--rope-scaling-factor",
    "layernorm_epsilon": "--norm-epsilon",
}
# Taken from a checkpoint by --use-checkpoint-args where the command line does not say.
UNSAID = ("seq_length", "max_position_embeddings", "tokenizer_type", "tokenizer_model")


def require_same_model(
    stored: Mapping[str, Any], args: argparse.Namespace, *, folder: Path, weights_only: bool
) -> None:
    """Raise UserError, naming the first flag that differs, for a checkpoint of another model."""
    flags = dict(SHAPE) if weights_only else {**SHAPE, **MEANING}
    if args.position_embedding_type == "learned_absolute":
        flags["max_position_embeddings"] = "--max-position-embeddings"
    if not args.group_query_attention and not stored.get("group_query_attention", False):
        flags.pop("num_query_groups")
    for name, flag in flags.items():
        if name in stored and hasattr(args, name) and stored[name] != getattr(args, name):
            raise UserError(
                f"the checkpoint {folder} is of another model: {flag} is "
                f"{_word(stored[name])} there and {_word(getattr(args, name))} here; give this run "
                "the flags of that model (--use-checkpoint-args takes them from it) or another "
                "--load"
            )
    _require_same_tokenizer(stored, args, folder=folder, weights_only=weights_only)
    if not weights_only and not args.no_load_optim:
        _require_same_optimizer(stored, args, folder=folder)


def _require_same_tokenizer(
    stored: Mapping[str, Any], args: argparse.Namespace, *, folder: Path, weights_only: bool
) -> None:
    theirs, ours = stored.get("tokenizer_vocab_size"), args.tokenizer_vocab_size
    if theirs is not None and theirs != ours:
        raise UserError(
            f"the checkpoint {folder} was trained with a tokenizer of {theirs} tokens and this "
            f"run's has {ours}; name the same one with --tokenizer-type and --tokenizer-model"
        )
    theirs, ours = stored.get("tokenizer_digest"), getattr(args, "tokenizer_digest", None)
    if theirs is not None and ours is not None and theirs != ours and not weights_only:
        raise UserError(
            f"the checkpoint {folder} was trained with another tokenizer of the same size; name "
            "the same one with --tokenizer-type and --tokenizer-model, or start anew from its "
            "weights with --finetune"
        )


def _require_same_optimizer(
    stored: Mapping[str, Any], args: argparse.Namespace, *, folder: Path
) -> None:
    theirs = stored.get("optimizer")
    if theirs is not None and theirs != args.optimizer:
        raise UserError(
            f"the checkpoint {folder} has the state of --optimizer {theirs} and this run uses "
            f"{args.optimizer}; use the same, or --no-load-optim to start without it"
        )


def _word(value: Any) -> str:
    return (
        {True: "on", False: "off"}.get(value, str(value))
        if isinstance(value, bool)
        else ("not given" if value is None else str(value))
    )


def adopt_checkpoint_args(args: argparse.Namespace) -> None:
    """--use-checkpoint-args: before the flags are checked, take the model's from the checkpoint.

    Its files are checked later; here its index is read. Raises UserError.
    """
    load = args.load or args.pretrained_checkpoint
    if load is None:
        raise UserError("--use-checkpoint-args needs --load; add it")
    if args.ckpt_step is not None:
        names = [folders.folder_name(args.ckpt_step)]
    else:
        names = folders.candidates(Path(load))
    for name in names:
        folder = Path(load) / name
        try:
            stored = read_index(folder).args
        except DamagedCheckpoint:
            continue
        adopt_model_args(args, stored, folder=folder)
        return
    raise UserError(f"--use-checkpoint-args: no checkpoint in {load} can be read; name another")


def adopt_model_args(args: argparse.Namespace, stored: Mapping[str, Any], *, folder: Path) -> None:
    """--use-checkpoint-args: the model's flags from the checkpoint, whatever was typed.

    Raises UserError for a --padded-vocab-size other than the checkpoint's: it asks for weights that
    the checkpoint does not have, or for a part of them.
    """
    rows = stored.get("padded_vocab_size")
    if rows is not None and args.padded_vocab_size not in (None, rows):
        raise UserError(
            f"--padded-vocab-size is {args.padded_vocab_size} and the checkpoint {folder} has "
            f"{rows} rows of vocabulary; leave the flag out, --use-checkpoint-args takes them "
            "from it"
        )
    args.padded_vocab_size = args.padded_vocab_size if rows is None else rows
    for name in (*SHAPE, *MEANING, "group_query_attention", "make_vocab_size_divisible_by"):
        if name in stored:
            setattr(args, name, stored[name])
    for name in UNSAID:
        if getattr(args, name, None) is None and name in stored:
            setattr(args, name, stored[name])
    # The two spellings of one flag must not contradict each other.
    args.use_rotary_position_embeddings = args.position_embedding_type == "rope"
    args.add_position_embedding = args.position_embedding_type == "learned_absolute"


_SCHEDULE_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "--lr-warmup-iters",
    "lr_decay_steps": "--lr-decay-iters or --train-iters",
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "--weight-decay",
    "end_wd": "--weight-decay",
    "wd_incr_steps": "--train-iters",
    "wd_incr_style": "--weight-decay-incr-style",
}


def require_same_schedule(stored: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise UserError for a schedule other than the checkpoint's: either could be meant."""
    for name, flag in _SCHEDULE_FLAGS.items():
        if name in stored and stored[name] != ours[name]:
            raise UserError(
                f"the checkpoint's schedule has {name.replace('_', ' ')} {stored[name]} and this "
                f"run's {ours[name]} ({flag}); keep it, or say which holds: "
                "--override-opt_param-scheduler for these flags, "
                "--use-checkpoint-opt_param-scheduler for the checkpoint"
            )
