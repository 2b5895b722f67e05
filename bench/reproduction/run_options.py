"""What runs of a model have in common: the flags of the tools that start them, and of the runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from bench.real_text.data_set import NAME as TEXT_NAME
from bench.reproduction.settings import (
    LLAMA3_8B,
    MODELS,
    TRAINING_FLAGS,
    VENDORS,
    ModelSetting,
    model_setting,
)
from hetero.errors import UserError
from hetero.text import counted, integer, number
from hetero.tools import tool_command_line
from hetero.tools.runs import mixed_flags
from megatron.hetero.arguments import build_parser, parse_args
from megatron.hetero.arguments.config_file import expand_config_files

MODEL_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "padded_vocab_size"),
)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What the command line says of every run."""

    setting: ModelSetting
    iterations: int
    warmup: int
    layers: tuple[int, ...] | None
    seq_length: int | None
    micro_batch_size: int | None
    global_batch_size: int | None
    data_path: tuple[str, ...]
    deadline: float
    resume: bool
    out: Path
    extra: tuple[str, ...]


OptionsT = TypeVar("OptionsT", bound=RunOptions)


def add_run_flags(parser: tool_command_line.Parser, *, iterations: int, warmup: int) -> None:
    """The flags of RunOptions, with a tool's own defaults."""
    add = parser.add_argument
    add("--model", default=LLAMA3_8B.name, help=f"{', '.join(MODELS)}, or a preset file")
    add(
        "--iterations",
        type=integer(1),
        default=iterations,
        help="iterations of one run",
    )
    add(
        "--warmup",
        type=integer(1),
        default=warmup,
        help="iterations at the start that are not measured: at least the first, which pays for "
        "start-up",
    )
    add(
        "--layers",
        type=integer(1),
        nargs=2,
        help="layers of each stage (default: the model's, or halves)",
    )
    for flag in ("--seq-length", "--micro-batch-size", "--global-batch-size"):
        add(flag, type=integer(1), help="default: the model's")
    add("--data-path", nargs="+", help=f"as for pretrain_gpt.py (default: {TEXT_NAME})")
    add(
        "--deadline",
        type=number(above=0),
        default=600.0,
        help="timeout of one run in seconds, start-up included",
    )
    add("--resume", action="store_true", help="reuse the runs that --out holds")
    add("--out", required=True, help="folder for the results")


def parse_words(
    parser: tool_command_line.Parser, argv: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The tool's own flags, and the fields of RunOptions. What follows `--` is of every run.

    Raises UserError.
    """
    given, extra = parser.parse_with_run_flags(argv)
    setting = model_setting(given.model)
    _check(given)
    return given, {
        "setting": setting,
        "iterations": given.iterations,
        "warmup": given.warmup,
        "layers": tuple(given.layers) if given.layers else setting.layers,
        "seq_length": given.seq_length or setting.seq_length,
        "micro_batch_size": given.micro_batch_size or setting.micro_batch_size,
        "global_batch_size": given.global_batch_size or setting.global_batch_size,
        "data_path": tuple(given.data_path or ()),
        "deadline": given.deadline,
        "resume": given.resume,
        "out": Path(given.out).absolute(),
        "extra": tuple(extra),
    }


def _check(given: argparse.Namespace) -> None:
    if given.warmup >= given.iterations:
        raise UserError(
            f"--warmup {given.warmup} leaves nothing of "
            f"{counted(given.iterations, 'iteration')} to measure; give less than --iterations"
        )
    for word in given.data_path or ():
        if not word.replace(".", "", 1).isdigit() and not Path(f"{word}.idx").is_file():
            raise UserError(
                f"--data-path {word}: there is no {word}.idx; give the prefix that "
                "tools/preprocess_data.py wrote"
            )


def require_gpus(nproc: int, *, flag: str) -> None:
    """Refuse more processes than there are GPUs, where there are any. Raises UserError."""
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and gpus < nproc:
        raise UserError(f"{flag} needs as many GPUs and there are {gpus}")


def require_memory(setting: ModelSetting, extra: Sequence[str]) -> None:
    """Refuse a published model as it is on a machine without a GPU. Raises UserError."""
    if setting.published and not extra and not torch.cuda.is_available():
        raise UserError(
            f"this machine has no GPU, and {setting.name} would fill its memory; give --model a "
            "small preset, such as examples/presets/tiny.yaml"
        )


def fastest_transport() -> str:
    """The transport between two devices of this machine that a tool measures by default."""
    return "device-direct" if torch.cuda.is_available() else "shm"


def possible_here(rows: Sequence[str]) -> list[str]:
    """Those of a tool's default rows that this machine can run: device-direct joins GPUs."""
    return [row for row in rows if row != "device-direct" or torch.cuda.is_available()]


def all_flags(options: RunOptions, own: Sequence[str], *, data: Sequence[str]) -> list[str]:
    """All flags of a run: of the model, training, the data, its `own`, and the user's."""
    preset, _ = expand_config_files(["--yaml-cfg", str(options.setting.preset)], build_parser())
    # Text takes the place of a preset's made-up tokens.
    flags = [word for word in preset if word != "--mock-data"]
    flags += TRAINING_FLAGS.split()
    flags += ["--train-iters", str(options.iterations)]
    for flag, value in (
        ("--seq-length", options.seq_length),
        ("--micro-batch-size", options.micro_batch_size),
        ("--global-batch-size", options.global_batch_size),
    ):
        flags += [flag, str(value)] if value is not None else []
    flags += ["--data-path", *options.data_path] if options.data_path else data
    return [*flags, *own, *options.extra]


def parsed(options: RunOptions, own: Sequence[str], *, nproc: int) -> argparse.Namespace:
    """The checked arguments of a run, before its data exist. Raises UserError."""
    return parse_args(all_flags(options, own, data=["--mock-data"]), world_size=nproc)


def without_false_comparison(options: OptionsT) -> OptionsT:
    """Say so where the user's own flags make another model of a published one."""
    setting = options.setting
    if not setting.published:
        return options

    def sizes(given: RunOptions, layers: tuple[int, ...] | None) -> list[Any]:
        own = mixed_flags(vendors=VENDORS, sizes=(1, 1), layers=layers, transport="gloo")
        args = parsed(given, own, nproc=len(VENDORS))
        return [getattr(args, name) for name in MODEL_SIZES]

    if sizes(options, options.layers) == sizes(replace(options, extra=()), setting.layers):
        return options
    changed = replace(setting, name=f"{setting.name} (modified)", published={})
    return replace(options, setting=changed)
