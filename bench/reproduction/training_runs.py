"""Runs one after the other, each of which is kept as soon as it has ended."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bench.real_text.data_set import NAME as TEXT_NAME
from bench.real_text.data_set import build_real_text
from bench.reproduction.measurement import Attempt, measure
from bench.reproduction.run_options import RunOptions, all_flags, require_memory
from hetero.errors import HeteroError, UserError
from hetero.text import counted
from hetero.tools import tool_command_line
from hetero.tools.runs import Launch, failure_text, run_to_end

TUNING_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "HSA_",
    "NCCL_",
    "OMP_NUM_THREADS",
    "PYTORCH_",
    "RCCL_",
    "TORCH_NCCL_",
)
"""How those begin that move a figure; the results say what they were."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run: the row that it is of, and what it has that others have not."""

    row: str
    round: int = 1
    flags: tuple[str, ...]
    nproc: int
    environ: Mapping[str, str] = field(default_factory=dict)


def attempt(options: RunOptions, run: PlannedRun, *, data: Sequence[str]) -> Attempt:
    """Make a run. What goes wrong with it is its result."""
    cores = len(os.sched_getaffinity(0))
    environ = {"OMP_NUM_THREADS": str(max(1, cores // run.nproc))}
    launch = Launch(
        name=f"{run.row}-{run.round}",
        flags=tuple(all_flags(options, run.flags, data=data)),
        nproc=run.nproc,
        folder=options.out,
        # Initial weights are drawn on the CPU, by as many threads as there are cores for.
        environ=environ | os.environ | dict(run.environ),
        deadline=options.deadline,
    )
    began = time.monotonic()
    try:
        measurement, problem = measure(run_to_end(launch), warmup=options.warmup), None
    except HeteroError as error:
        measurement, problem = None, failure_text(error, launch)
    return Attempt(
        row=run.row,
        round=run.round,
        measurement=measurement,
        problem=problem,
        seconds=time.monotonic() - began,
    )


def run_all(
    options: RunOptions,
    runs: Sequence[PlannedRun],
    *,
    results: Path,
    write: Callable[[Sequence[Attempt]], str],
) -> str:
    """Make the runs, calling `write` after each. Returns the text that it returned last.

    With --resume those that `results` holds are not made again. Raises HeteroError where a run has
    no result, UserError where this machine cannot make them, and Interrupted.
    """
    require_memory(options.setting, options.extra)
    attempts = resumed_attempts(options, runs, results) if options.resume else []
    options.out.mkdir(parents=True, exist_ok=True)
    known = {(one.row, one.round) for one in attempts}
    text = write(attempts) if attempts else ""
    try:
        with data_flags(options) as data:
            for run in runs:
                if (run.row, run.round) in known:
                    continue
                print(f"round {run.round}: {run.row}", flush=True)
                attempts.append(attempt(options, run, data=data))
                print(f"  {_outcome(attempts[-1])} ({attempts[-1].seconds:.0f} s)", flush=True)
                text = write(attempts)
    except KeyboardInterrupt:
        raise tool_command_line.Interrupted(
            f"interrupted after {len(attempts)} of {counted(len(runs), 'run')}; what those "
            f"measured is in {options.out}, and --resume goes on from it"
        ) from None
    print(f"\n{text}")
    failed = sum(one.problem is not None for one in attempts)
    if failed:
        raise HeteroError(
            f"{failed} of {len(attempts)} runs have no result; {results.with_suffix('.md')} says "
            "why, the logs beside it say more"
        )
    return text


def resumed_attempts(
    options: RunOptions, runs: Sequence[PlannedRun], results: Path
) -> list[Attempt]:
    """What `results` holds of these runs, those that failed left out. Raises UserError."""
    if not results.exists():
        return []
    record, now = json.loads(results.read_text()), asked(options, runs)
    before = record["asked"]
    same = {row: now["runs"].get(row) for row in before["runs"]} == before["runs"]
    if not same or before["warmup"] != now["warmup"]:
        raise UserError(
            f"--resume: {results} has runs of other flags or another warm-up, or some that are not "
            "asked for now; give what it was made with and what shall be added, or another --out"
        )
    return [Attempt.of_mapping(one) for one in record["runs"] if one["measurement"]]


def asked(options: RunOptions, runs: Sequence[PlannedRun]) -> dict[str, Any]:
    """What decides the figures, as JSON holds it."""
    return {
        "warmup": options.warmup,
        "runs": {
            run.row: {
                "flags": all_flags(options, run.flags, data=["<built-in text>"]),
                "environ": dict(run.environ),
            }
            for run in runs
        },
    }


def record_of(
    options: RunOptions,
    runs: Sequence[PlannedRun],
    attempts: Sequence[Attempt],
    command: Sequence[str],
) -> dict[str, Any]:
    """What the JSON of every such tool holds: the machine, what was asked for, and every run."""
    return {
        "model": options.setting.name,
        "machine": {
            "device": device_of(attempts),
            "torch": str(torch.__version__),
            "megatron_core": metadata.version("megatron-core"),
            "cores": len(os.sched_getaffinity(0)),
            "environment": {
                name: value
                for name, value in os.environ.items()
                if name.startswith(TUNING_VARIABLES)
            },
        },
        "simulated": is_simulated(attempts),
        "data": list(options.data_path) or TEXT_NAME,
        "command": list(command),
        "asked": asked(options, runs),
        "is_complete": len(attempts) == len(runs),
        "runs": [asdict(one) for one in attempts],
    }


def device_of(attempts: Sequence[Attempt]) -> str:
    """What the runs computed on."""
    return next((one.measurement.device for one in attempts if one.measurement), "unknown devices")


def is_simulated(attempts: Sequence[Attempt]) -> bool:
    """Whether one machine has played several vendors in any of the runs."""
    return any(one.measurement.simulated for one in attempts if one.measurement)


@contextmanager
def data_flags(options: RunOptions) -> Iterator[list[str]]:
    """Flags of the built-in text, which lasts as long as the runs. None for the user's data."""
    if options.data_path:
        yield []
        return
    with tempfile.TemporaryDirectory(dir=options.out, prefix="data-") as folder:
        yield build_real_text(Path(folder)).flags


def _outcome(one: Attempt) -> str:
    if one.measurement is None:
        return str(one.problem)
    values = sorted(one.measurement.tflops)
    return f"{values[len(values) // 2]:.4g} TFLOP/s per GPU"
