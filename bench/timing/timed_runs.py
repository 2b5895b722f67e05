"""What benchmarks of speed tell of a run: tokens a second, memory, losses, or its error."""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def timed_peer(step: Step, out: Path, *, tokens: int) -> dict[str, Any]:
    """The same of a peer's program, which writes a line of JSON for each step to `out`."""
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


def profiled_events(traces: Path) -> list[dict[str, Any]] | None:
    """The events of the last trace that torch's profiler wrote below a folder; None: of none."""
    files = sorted(traces.rglob("*.json*"))
    if not files:
        return None
    opened = gzip.open if files[-1].suffix == ".gz" else open
    with opened(files[-1], "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events
