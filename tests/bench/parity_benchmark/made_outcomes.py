"""Outcomes of runs that nobody trained: curves drawn from a seed, metrics files as a run's."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.parity_benchmark.parity_runs import Run, planned_runs
from bench.parity_benchmark.side_by_side import Outcome
from hetero.tools.runs import Finished, Launch

ITERATIONS = 40
TRANSPORTS = ("device-direct", "cpu-forward")


def outcome(
    folder: Path,
    run: Run,
    *,
    factor: float = 1.0,
    changed_after: int = 5,
    weights: str = "same",
    broken_from: int | None = None,
) -> Outcome:
    """A run that ended well.

    `factor` scales its losses after the first `changed_after` iterations; from `broken_from` on
    they are not numbers, which a metrics file calls null.
    """
    noise = random.Random(run.seed)
    records: list[dict[str, Any]] = [
        {
            "iteration": number,
            "loss": (3 + 6 / number)
            * (1 + noise.gauss(0, 1e-3))
            * (factor if number > changed_after else 1),
            "grad_norm": 1 + noise.random() / 10,
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "batch_size": 4,
            "consumed_tokens": 256 * number,
            "skipped": False,
            "simulated": not run.is_homogeneous,
        }
        for number in range(1, ITERATIONS + 1)
    ]
    for record in records[broken_from - 1 :] if broken_from else ():
        record["loss"] = None
    report = {
        "simulated": not run.is_homogeneous,
        "weights": {"sha256": weights},
        "transport": run.transport,
        "ranks": [{"device": "NVIDIA H200"}],
    }
    launch = Launch(
        name=run.file_stem,
        flags=(),
        nproc=2,
        folder=folder,
        environ={"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "0,1"},
    )
    launch.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Outcome(launch, finished=Finished(records, report), seconds=12.34)


def outcomes(folder: Path, kernels: str) -> dict[Run, Outcome]:
    """All runs with these kernels, each of which ended well."""
    return {run: outcome(folder, run) for run in planned_runs([kernels], TRANSPORTS)}


def failed(good: Outcome, problem: str) -> Outcome:
    return replace(good, finished=None, problem=problem)
