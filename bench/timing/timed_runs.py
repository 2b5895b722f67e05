"""What benchmarks of speed tell of a run: tokens a second, memory, losses, or its error."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from hetero.errors import HeteroError
from hetero.tools.launching.processes import Step, run_step
from hetero.tools.runs import Launch, failure_text, run_to_end

WARM_UP = 2
"""Steps of a run that are not counted."""


def timed_run(launch: Launch, *, tokens: int) -> dict[str, Any]:
    """The figures of a run of ours, whose steps have so many `tokens`; else its `error`."""
    try:
        found = run_to_end(launch)
    except HeteroError as error:
        return {"error": failure_text(error, launch)}
    seconds = [record["elapsed_ms"] / 1e3 for record in found.iterations[WARM_UP:]]
    peaks = [row["peak_memory_bytes"] for row in found.report["ranks"]]
    losses = [record["loss"] for record in found.iterations]
    return _figures(seconds, max(peaks), tokens, losses)


def timed_peer(
    name: str, script: Path, words: Sequence[str], folder: Path, *, nproc: int, tokens: int
) -> dict[str, Any]:
    """The same of a peer's script, which writes a line of JSON for each step to the file OUT."""
    label = name.replace(" ", "_")
    out = folder / f"{label}.jsonl"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    step = Step(
        name=name,
        command=(*launcher, f"--nproc-per-node={nproc}", str(script), *words),
        log=folder / f"{label}.log",
        directory=Path.cwd(),
        environment=dict(os.environ) | {"OUT": str(out)},
    )
    try:
        run_step(step, lambda: None)
    except HeteroError as error:
        return {"error": str(error)[:500]}
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    seconds = [row["seconds"] for row in rows[WARM_UP:]]
    return _figures(seconds, rows[-1]["peak"], tokens, [row["loss"] for row in rows])


def _figures(
    seconds: Sequence[float], peak: int, tokens: int, losses: Sequence[float]
) -> dict[str, Any]:
    return {
        "tokens_per_s": round(tokens / statistics.median(seconds), 1),
        "seconds": [round(each, 4) for each in seconds],
        "peak_gib": round(peak / 2**30, 2),
        "losses": list(losses),
    }


def profiled_step(
    run: Callable[..., dict[str, Any]],
    traces: Path,
    *,
    step: int,
    read: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> dict[str, Any]:
    """What `read` says of the profiler's events of one step on rank 0; else the run's `error`.

    `run` takes further flags, and gives figures as `timed_run`.
    """
    found = run(
        *("--profile", "--use-pytorch-profiler", "--profile-ranks", "0"),
        *("--profile-step-start", str(step), "--profile-step-end", str(step + 1)),
        *("--tensorboard-dir", str(traces)),
    )
    if "error" in found:
        return found
    events = _events(traces)
    return {"error": "the profiler has written no trace"} if events is None else read(events)


def _events(traces: Path) -> list[dict[str, Any]] | None:
    """The events of the last trace that torch's profiler wrote below a folder; None: of none."""
    files = sorted(traces.rglob("*.json*"))
    if not files:
        return None
    opened = gzip.open if files[-1].suffix == ".gz" else open
    with opened(files[-1], "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def measure(
    script: str,
    args: argparse.Namespace,
    *,
    model: dict[str, Any],
    rows: Callable[[Path], Iterable[tuple[str, dict[str, Any]]]],
) -> str:
    """Write the record of a benchmark to `args.out`, anew after each of its `rows` (in a temporary
    folder), and give its lines.

    `args` has the words that were `typed`, and `on_cpu`: whether it may run without a GPU.
    """
    gpus = torch.cuda.device_count()
    if not gpus and not args.on_cpu:
        raise HeteroError("these runs need a GPU; --on-cpu tries the command on a small model")
    record: dict[str, Any] = {
        "command": " ".join([f"python bench/{script}", *args.typed]),
        "date": date.today().isoformat(),
        "hardware": f"{gpus}x {torch.cuda.get_device_name()}" if gpus else "CPU",
        "torch": torch.__version__,
        "model": model,
        "runs": {},
    }
    lines = []
    with tempfile.TemporaryDirectory() as name:
        for key, row in rows(Path(name)):
            record["runs"][key] = row
            lines.append(f"{key}: {json.dumps(row)[:400]}")
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    return "\n".join([*lines, f"written: {args.out}"])
