"""Flags of existing launch scripts that change nothing here.

They are accepted so that a script runs unchanged, and collected in `args.ignored_flags` so that
the log can say which of its flags do nothing, and why.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ignored:
    """One such flag: Megatron's destination and default are kept for code that reads them."""

    reason: str
    dest: str
    default: Any = False
    takes_value: bool = False


_ONE_LOGGER = "this program does not report to NVIDIA's one-logger"
_DEPRECATED = "deprecated in Megatron-LM; --ckpt-format chooses the checkpoint format"

IGNORED: dict[str, Ignored] = {
    "--use-mcore-models": Ignored(
        "megatron-core models are the only ones", "deprecated_use_mcore_models"
    ),
    "--use-flash-attn": Ignored("--attention-backend chooses the kernel", "use_flash_attn"),
    "--no-one-logger": Ignored(_ONE_LOGGER, "enable_one_logger", True),
    "--one-logger-project": Ignored(_ONE_LOGGER, "one_logger_project", "megatron-lm", True),
    "--one-logger-run-name": Ignored(_ONE_LOGGER, "one_logger_run_name", None, True),
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
}


def add_ignored_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("accepted, without effect")
    for flag, ignored in IGNORED.items():
        if ignored.takes_value:
            group.add_argument(
                flag, dest=ignored.dest, default=ignored.default, help=ignored.reason
            )
        else:
            action = "store_false" if ignored.default is True else "store_true"
            group.add_argument(flag, dest=ignored.dest, action=action, help=ignored.reason)


def describe_ignored(given: Iterable[str]) -> list[str]:
    """'--flag: reason' for each flag of `given` that does nothing here, in the order typed."""
    return [f"{flag}: {IGNORED[flag].reason}" for flag in given if flag in IGNORED]
