"""Starts training runs on this machine and reads what they leave behind."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hetero import cli
from hetero.errors import HeteroError
from hetero.text import counted
from hetero.tools.launching.processes import Step, StepFailure, log_lines, run_step
from hetero.tools.run_comparison.curves import Curve, curve_of

WARMUP_ITERATIONS = 10


@dataclass(frozen=True)
class Launch:
    """One run of `hetero pretrain` under hetero.run, and where its files go."""

    name: str
    flags: tuple[str, ...]
    nproc: int
    folder: Path
    environ: Mapping[str, str]
    """Added to this process's own."""
    deadline: float | None = None
    """Seconds from the start of the launcher to its end; None for no limit."""
    entry: tuple[str, ...] = cli.rank_command("pretrain")
    """What hetero.run starts as every rank: a script, or `-m` and a module."""
    python: str = sys.executable

    @property
    def metrics(self) -> Path:
        return self.folder / f"{self.name}.metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.folder / f"{self.name}.report.json"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def command(self) -> tuple[str, ...]:
        launcher = (self.python, "-m", "hetero.run", "--standalone")
        written = ("--metrics-file", str(self.metrics), "--hetero-report", str(self.report))
        return (*launcher, f"--nproc-per-node={self.nproc}", *self.entry, *self.flags, *written)


@dataclass(frozen=True)
class Finished:
    """What a run that ended well wrote: a record of every iteration, and the report."""

    iterations: list[dict[str, Any]]
    report: dict[str, Any]

    def curve(self, name: str) -> Curve:
        """What it computed, to be compared with another run's."""
        return curve_of(self.iterations, name=name, weights=self.report["weights"]["sha256"])

    def steady(self, figure: str) -> float:
        """The median of a figure over the iterations after the first ones.

        Those pay for compilation, caches and buffers: ten of them, or half of a short run.
        """
        values = [record[figure] for record in self.iterations]
        return median(values[min(WARMUP_ITERATIONS, len(values) // 2) :])


class DeadlinePassed(HeteroError):
    """A run was ended because it took too long."""


def run_to_end(launch: Launch, watch: Callable[[], None] = lambda: None) -> Finished:
    """Train to the end, calling `watch` on the way: what that raises ends the run too.

    Raises StepFailure when the run fails and DeadlinePassed when it takes too long. Whatever ends
    this process ends the run and every process of it.
    """
    for stale in (launch.metrics, launch.report):
        stale.unlink(missing_ok=True)
    began = time.monotonic()

    def guard() -> None:
        watch()
        if launch.deadline is not None and time.monotonic() - began > launch.deadline:
            raise DeadlinePassed(
                f"{launch.name} was ended at its deadline of {launch.deadline:g} s, after "
                f"{counted(len(_records(launch.metrics)), 'iteration')}; allow it more time or "
                "less work"
            )

    run_step(
        Step(
            name=launch.name,
            command=launch.command(),
            log=launch.log,
            directory=Path.cwd(),
            environment=cli.rank_environment(os.environ) | dict(launch.environ),
        ),
        guard,
    )
    return Finished(
        iterations=_records(launch.metrics), report=json.loads(launch.report.read_text())
    )


def failure_text(error: HeteroError, launch: Launch) -> str:
    """Why a run has no result, in a sentence: what it said itself where it failed."""
    if not isinstance(error, StepFailure):
        return str(error)
    said = error.sentence or (log_lines(launch.log) or ["it said nothing"])[-1]
    return f"failed with exit code {error.code}: {said}"


def _records(metrics: Path) -> list[dict[str, Any]]:
    if not metrics.exists():
        return []
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def mixed_flags(
    *, vendors: Sequence[str], sizes: Sequence[int], layers: Sequence[int] | None, transport: str
) -> list[str]:
    """Flags of a pipeline over several meshes, whose `sizes` count their stages."""
    flags = ["--hetero-pipeline", "--hetero-vendors", *vendors]
    flags += ["--hetero-pipeline-sizes", *map(str, sizes), "--hetero-transport", transport]
    if layers:
        flags += ["--hetero-pipeline-layers", *map(str, layers)]
    return flags


def homogeneous_flags(*, stages: int, layers: Sequence[int] | None) -> list[str]:
    """Flags of the same pipeline on one vendor: megatron-core's own, on the vendor's library."""
    flags = ["--pipeline-model-parallel-size", str(stages)]
    if layers:
        parts = "|".join(f"t*{count}" for count in layers)
        flags += ["--pipeline-model-parallel-layout", f"E{parts}L"]
    return flags


SIMULATED = {"HETERO_VENDOR": "plan"}
"""Environment in which every rank plays the vendor that the plan gives it."""
