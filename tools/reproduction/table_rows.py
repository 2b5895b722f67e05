"""The rows: which flags each one has, in which order they run, and one run of one of them."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.errors import HeteroError
from megatron.training.arguments import build_parser, parse_args
from megatron.training.arguments.config_file import expand_config_files
from tools.reproduction.measurement import Attempt, measure
from tools.reproduction.settings import HOMOGENEOUS, TRAINING_FLAGS, VENDORS, ModelSetting
from tools.runs import (
    SIMULATED,
    Launch,
    failure_text,
    homogeneous_flags,
    mixed_flags,
    run_to_end,
)


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    setting: ModelSetting
    nproc: int
    rows: tuple[str, ...]
    rounds: int
    iterations: int
    warmup: int
    layers: tuple[int, ...] | None
    seq_length: int | None
    micro_batch_size: int | None
    global_batch_size: int | None
    data_path: tuple[str, ...]
    deadline: float
    out: Path
    extra: tuple[str, ...]


def row_flags(options: Options, row: str, *, data: Sequence[str]) -> list[str]:
    """All flags of a row: those of the model, training, the data, the row, and the user's."""
    preset = expand_config_files(["--yaml-cfg", str(options.setting.preset)], build_parser())
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
    if row == HOMOGENEOUS:
        flags += homogeneous_flags(stages=len(VENDORS), layers=options.layers)
    else:
        flags += mixed_flags(vendors=VENDORS, sizes=(1, 1), layers=options.layers, transport=row)
    return [*flags, *options.extra]


def parsed_row(options: Options, row: str) -> argparse.Namespace:
    """The checked arguments of a row, before its data exist. Raises UserError."""
    return parse_args(row_flags(options, row, data=["--mock-data"]), world_size=options.nproc)


def run_order(options: Options) -> Iterator[tuple[int, str]]:
    """Rounds and rows: A B C, C B A, A B C. A drift then falls on all rows alike."""
    for number in range(1, options.rounds + 1):
        rows = options.rows if number % 2 else options.rows[::-1]
        yield from ((number, row) for row in rows)


def attempt(options: Options, row: str, round_number: int, *, data: Sequence[str]) -> Attempt:
    """Run a row once. What goes wrong with the run is its result."""
    cores = len(os.sched_getaffinity(0))
    environ = {"OMP_NUM_THREADS": str(max(1, cores // options.nproc))}
    launch = Launch(
        name=f"{row}-{round_number}",
        flags=tuple(row_flags(options, row, data=data)),
        nproc=options.nproc,
        folder=options.out,
        # Initial weights are drawn on the CPU, by as many threads as there are cores for.
        environ=environ | os.environ | ({} if row == HOMOGENEOUS else SIMULATED),
        deadline=options.deadline,
    )
    began = time.monotonic()
    try:
        measurement, problem = measure(run_to_end(launch), warmup=options.warmup), None
    except HeteroError as error:
        measurement, problem = None, failure_text(error, launch)
    return Attempt(
        row=row,
        round=round_number,
        measurement=measurement,
        problem=problem,
        seconds=time.monotonic() - began,
    )
