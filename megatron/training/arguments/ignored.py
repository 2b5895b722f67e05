"""Flags of existing launch scripts that have no effect here.

They are accepted so that a script runs unchanged, and listed with the reason in
`args.ignored_flags`, for the log.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ignored:
    """A flag that has no effect, with Megatron's destination and default."""

    reason: str
    dest: str
    default: Any = False
    takes_value: bool = False
    choices: tuple[str, ...] | None = None
    """The values that are accepted; None if all are."""


_ONE_LOGGER = "this program does not report to NVIDIA's one-logger"
_DEPRECATED = "deprecated in Megatron-LM; checkpoints have one format here"

IGNORED: dict[str, Ignored] = {
    "--use-mcore-models": Ignored(
        "megatron-core models are the only ones", "deprecated_use_mcore_models"
    ),
    "--use-flash-attn": Ignored("--attention-backend chooses the kernel", "use_flash_attn"),
    "--no-one-logger": Ignored(_ONE_LOGGER, "enable_one_logger", True),
    "--one-logger-project": Ignored(_ONE_LOGGER, "one_logger_project", "megatron-lm", True),
    "--one-logger-run-name": Ignored(_ONE_LOGGER, "one_logger_run_name", None, True),
    "--enable-one-logger": Ignored(_ONE_LOGGER, "enable_one_logger_by_name"),
    "--one-logger-entity": Ignored(_ONE_LOGGER, "one_logger_entity", None, True),
    "--one-logger-async": Ignored(_ONE_LOGGER, "one_logger_async"),
    "--app-tag-run-name": Ignored(_ONE_LOGGER, "app_tag_run_name", None, True),
    "--app-tag-run-version": Ignored(_ONE_LOGGER, "app_tag_run_version", "0.0.0", True),
    "--disable-msc": Ignored("files are read and written directly", "enable_msc", True),
    "--use-dist-ckpt": Ignored(_DEPRECATED, "use_dist_ckpt_deprecated"),
    "--dist-ckpt-format": Ignored(_DEPRECATED, "dist_ckpt_format_deprecated", None, True),
    "--ckpt-fully-parallel-save": Ignored(
        "deprecated in Megatron-LM, where it is the default", "ckpt_fully_parallel_save_deprecated"
    ),
    "--legacy-tokenizer": Ignored("megatron-core tokenizers are the only ones", "legacy_tokenizer"),
    "--lazy-mpu-init": Ignored(
        "it has no effect in Megatron-LM either", "lazy_mpu_init", None, True
    ),
    "--onnx-safe": Ignored("models are not exported to ONNX here", "onnx_safe", None, True),
    "--no-scatter-gather-tensors-in-pipeline": Ignored(
        "stages send whole tensors", "scatter_gather_tensors_in_pipeline", True
    ),
    "--use-contiguous-parameters-in-local-ddp": Ignored(
        "gradients always lie in one buffer", "use_contiguous_parameters_in_local_ddp"
    ),
    "--no-query-key-layer-scaling": Ignored(
        "scores are only scaled by --apply-query-key-layer-scaling", "no_query_key_layer_scaling"
    ),
    "--log-optimizer-states-to-tensorboard": Ignored(
        "the optimizer's state is not recorded", "log_optimizer_states_to_tensorboard"
    ),
    "--log-batch-size-to-tensorboard": Ignored(
        "the batch size is always there", "log_batch_size_to_tensorboard"
    ),
    "--log-learning-rate-to-tensorboard": Ignored(
        "the learning rate is always there", "log_learning_rate_to_tensorboard"
    ),
    "--data-impl": Ignored("token files have one format", "data_impl", None, True),
    "--fused-single-qkv-rope": Ignored(
        "queries and keys are rotated with plain tensor operations", "fused_single_qkv_rope"
    ),
    "--tokenizer-hf-no-use-fast": Ignored(
        "the Rust tokenizer is only used with --tokenizer-hf-use-fast", "tokenizer_hf_no_use_fast"
    ),
    "--tokenizer-hf-no-include-special-tokens": Ignored(
        "special tokens are only added with --tokenizer-hf-include-special-tokens",
        "tokenizer_hf_no_include_special_tokens",
    ),
    "--use-te-activation-func": Ignored(
        "activations are torch's or megatron-core's own", "use_te_activation_func"
    ),
    "--rerun-mode": Ignored(
        "no step is computed twice to be compared",
        "rerun_mode",
        "disabled",
        True,
        ("disabled", "validate_results", "report_stats", "report_determinism_stats"),
    ),
}


_ONE_FORMAT = "checkpoints have one format, which every rank writes its part of"
_LAUNCHER = "the launcher's LOCAL_RANK decides"

# Flags of other modules that have an effect in Megatron, and none here.
WITHOUT_EFFECT: dict[str, str] = {
    "--ckpt-format": _ONE_FORMAT,
    "--auto-detect-ckpt-format": _ONE_FORMAT,
    "--no-ckpt-fully-parallel-save": _ONE_FORMAT,
    "--disable-ckpt-fully-parallel-save": _ONE_FORMAT,
    "--ckpt-fully-parallel-load": _ONE_FORMAT,
    "--ckpt-assume-constant-structure": _ONE_FORMAT,
    "--dist-ckpt-strictness": _ONE_FORMAT,
    "--log-progress": "the log of the run says what was saved, and when",
    "--no-barrier-with-level-1-timing": "timers never make ranks wait for each other",
    "--log-throughput": "throughput is always logged",
    "--logging-level": "the program logs what a person can act on, at one level",
    "--no-manual-gc-eval": "evaluation triggers no collection of its own",
    "--disable-manual-gc-eval": "evaluation triggers no collection of its own",
    "--no-async-tensor-model-parallel-allreduce": "megatron-core decides this by itself",
    "--disable-async-tensor-model-parallel-allreduce": "megatron-core decides this by itself",
    "--disable-gloo-process-groups": "groups that cross vendors are gloo, others are not",
    "--no-persist-layer-norm": "the persistent norm kernel is not used",
    "--no-masked-softmax-fusion": "scores never leave the attention kernel",
    "--local-rank": _LAUNCHER,
    "--local_rank": _LAUNCHER,
    "--no-initialization": "weights are always drawn, by parameter name",
    "--use-cpu-initialization": "weights are always drawn on the CPU",
    "--no-create-attention-mask-in-dataloader": (
        "a mask is only made for --reset-attention-mask; causal attention needs none"
    ),
    "--vocab-extra-ids": "no tokenizer here has extra ids",
}


def add_ignored_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("accepted, without effect")
    for flag, ignored in IGNORED.items():
        if ignored.takes_value:
            group.add_argument(
                flag,
                dest=ignored.dest,
                default=ignored.default,
                choices=ignored.choices,
                help=ignored.reason,
            )
        else:
            action = "store_false" if ignored.default is True else "store_true"
            group.add_argument(flag, dest=ignored.dest, action=action, help=ignored.reason)


def describe_ignored(given: Iterable[str]) -> list[str]:
    """'--flag: reason' for each flag of `given` without effect, in the order typed."""
    reasons = {flag: ignored.reason for flag, ignored in IGNORED.items()} | WITHOUT_EFFECT
    return [f"{flag}: {reasons[flag]}" for flag in given if flag in reasons]
