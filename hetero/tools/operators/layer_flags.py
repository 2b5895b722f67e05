"""The command line of a training run, read for its layers alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from hetero.errors import Faults, UserError
from megatron.hetero.arguments import build_parser, parse_args
from megatron.hetero.arguments.config_file import expand_config_files
from megatron.hetero.arguments.data import SPLITS
from megatron.hetero.arguments.model import local_only_problems
from megatron.hetero.tokenizer.vocabulary import padded_vocab_size

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_VOCABULARY = 32768
# What a run needs and the operators do not depend on.
_FALLBACKS = {
    "--num-layers": ["1"],
    "--micro-batch-size": ["1"],
    "--train-iters": ["1"],
    "--lr": ["1"],
}
_DATA = ("--data-path", *(f"--{split}-data-path" for split in SPLITS))
# How one process runs whole operators, whatever the training run does.
_LONE_PROCESS = {
    "recompute_granularity": None,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "fp32_residual_connection": False,
    # Of a few layers these would be all.
    "first_last_layers_bf16": False,
}
_WHAT = (
    "num_layers seq_length micro_batch_size hidden_size ffn_hidden_size num_attention_heads "
    "group_query_attention num_query_groups kv_channels padded_vocab_size normalization "
    "layernorm_epsilon layernorm_zero_centered_gamma swiglu squared_relu add_bias_linear "
    "bias_gelu_fusion add_qkv_bias qk_layernorm position_embedding_type "
    "max_position_embeddings rotary_base rotary_percent rotary_interleaved "
    "rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor "
    "untie_embeddings_and_output_weights init_method_std embedding_init_method_std "
    "init_method_xavier_uniform fp8_format fp8_recipe fp8_wgrad"
).split()
_HOW = (
    "attention_backend attention_softmax_in_fp32 bias_swiglu_fusion "
    "bias_dropout_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl apply_rope_fusion "
    "gradient_accumulation_fusion deterministic_mode"
).split()


def layer_arguments(words: Sequence[str], *, dtype: str, layers: int) -> argparse.Namespace:
    """Megatron's flags in `words`, with what one process running `layers` layers needs.

    `dtype` is a key of DTYPES and wins over the flags. Raises UserError.
    """
    args = model_arguments(words, vocabulary=_VOCABULARY)
    if args.transformer_impl != "local":
        raise UserError(
            f"--transformer-impl {args.transformer_impl} joins several operators into one module; "
            "compare_ops.py compares those of --transformer-impl local"
        )
    unknown = [said.partition(":")[0] for said in local_only_problems(args)]
    if args.softmax_scale is not None:
        unknown.append("--softmax-scale")
    if unknown:
        flags = ", ".join(unknown)
        raise UserError(f"compare_ops.py has no reference for {flags}; compare without them")
    if args.fp8_format is not None and dtype != "bf16":
        raise UserError(
            f"--fp8-format {args.fp8_format} is of matrices in bf16, and --dtype is {dtype}; give "
            "--dtype bf16"
        )
    for name, value in _LONE_PROCESS.items():
        setattr(args, name, value)
    args.num_layers = layers
    args.params_dtype = DTYPES[dtype]
    args.bf16, args.fp16 = dtype == "bf16", dtype == "fp16"
    return args


def model_arguments(words: Sequence[str], *, vocabulary: int | None = None) -> argparse.Namespace:
    """Megatron's flags in `words`; what only a run needs may be left out.

    `vocabulary` is that of flags that say none, also where they name a tokenizer, which is not
    read. Raises UserError; without `vocabulary` also where the flags say none.
    """
    words, _ = expand_config_files(words, build_parser())
    given = {word.split("=", 1)[0] for word in words}
    for flag, values in _FALLBACKS.items():
        if flag not in given:
            words += [flag, *values]
    if given.isdisjoint(("--mock-data", *_DATA)):
        words += ["--mock-data"]
    faults = Faults()
    if given.isdisjoint(("--vocab-size", "--padded-vocab-size")):
        if vocabulary is None:
            faults.add(
                [
                    "the flags do not say --padded-vocab-size, the rows of the embedding; add it "
                    "(no tokenizer is read for it)"
                ]
            )
        words += ["--vocab-size", str(vocabulary or 1)]
    elif "--tokenizer-type" not in given and "--vocab-size" not in given:
        words += ["--vocab-size", "1"]
    if "--tokenizer-type" not in given:
        words += ["--tokenizer-type", "NullTokenizer"]
    args = faults.read(lambda: parse_args(words, world_size=1))
    faults.refuse()
    assert args is not None
    if args.padded_vocab_size is None:
        args.padded_vocab_size = padded_vocab_size(
            args.vocab_size,
            make_divisible_by=args.make_vocab_size_divisible_by,
            tensor_parallel_size=1,
        )
    return args


def compared_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that must be the same on both sides."""
    return {name: getattr(args, name) for name in _WHAT}


def kernel_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that choose between kernels."""
    return {name: getattr(args, name) for name in _HOW}
