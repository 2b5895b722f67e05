"""The rows: which flags each one has, and in which order they run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from bench.reproduction.run_options import RunOptions, parsed
from bench.reproduction.settings import EVERY_GROUP, HOMOGENEOUS, VENDORS
from bench.reproduction.training_runs import PlannedRun
from hetero.tools.runs import SIMULATED, homogeneous_flags, mixed_flags


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """What the command line asks for."""

    nproc: int
    rows: tuple[str, ...]
    rounds: int


def planned_run(options: Options, row: str, round_number: int = 1) -> PlannedRun:
    """A row's run. Rows differ in what crosses between the stages, and in nothing else."""
    if row == HOMOGENEOUS:
        own = homogeneous_flags(stages=len(VENDORS), layers=options.layers)
    else:
        transport = "gloo" if row == EVERY_GROUP else row
        own = mixed_flags(vendors=VENDORS, sizes=(1, 1), layers=options.layers, transport=transport)
        own += ["--distributed-backend", "gloo"] if row == EVERY_GROUP else []
    return PlannedRun(
        row=row,
        round=round_number,
        flags=tuple(own),
        nproc=options.nproc,
        environ={} if row == HOMOGENEOUS else SIMULATED,
    )


def parsed_row(options: Options, row: str) -> argparse.Namespace:
    """The checked arguments of a row, before its data exist. Raises UserError."""
    return parsed(options, planned_run(options, row).flags, nproc=options.nproc)


def run_order(options: Options) -> Iterator[PlannedRun]:
    """Rounds and rows: A B C, C B A, A B C. A drift then falls on all rows alike."""
    for number in range(1, options.rounds + 1):
        rows = options.rows if number % 2 else options.rows[::-1]
        yield from (planned_run(options, row, number) for row in rows)
