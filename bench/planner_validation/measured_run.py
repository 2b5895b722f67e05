"""What a run of our own shows: its steps, its memory, and whether it could compute throughout."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from hetero.tools.runs import Finished, Launch


@dataclass(frozen=True)
class MeasuredRun:
    """What one run showed."""

    seconds: list[float]
    """Of each iteration, the first ones included."""
    peak_bytes: list[float]
    """Of each rank."""
    held_up: float = 0.0
    """Part of the time for which the rank that waited most could not compute, because another
    program had its core. Known of CPUs."""

    @property
    def steady(self) -> list[float]:
        """Iterations after the first half, which pays for caches and connections."""
        return self.seconds[len(self.seconds) // 2 :]

    @property
    def step(self) -> float:
        return median(self.steady)

    @classmethod
    def of(cls, run: Finished, *, held_up: float = 0.0) -> MeasuredRun:
        seconds = [record["elapsed_ms"] / 1000 for record in run.iterations]
        peaks = [rank["peak_memory_bytes"] for rank in run.report["ranks"]]
        return cls(seconds, peaks, held_up)


class CpuContention:
    """Looks, while a run trains, for how long its ranks stood in the queue of a core."""

    def __init__(self, launch: Launch) -> None:
        self._metrics = launch.metrics
        self._seen: dict[int, list[tuple[float, float]]] = {}

    def look(self) -> None:
        if not self._metrics.exists() or not self._metrics.stat().st_size:
            return  # it starts, which is not measured
        # Ranks that train are all there. To look through all processes of the machine again would
        # hold them up: it takes a millisecond.
        for pid in list(self._seen) or _descendants():
            with contextlib.suppress(OSError, ValueError):  # it has just ended
                _, queued, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
                self._seen.setdefault(pid, []).append((time.monotonic(), int(queued) / 1e9))

    @property
    def share(self) -> float:
        spans = [(seen[0], seen[-1]) for seen in self._seen.values() if len(seen) > 1]
        return max((b[1] - a[1]) / (b[0] - a[0]) for a, b in spans) if spans else 0.0


def _descendants() -> list[int]:
    """The processes that this one and its children have started."""
    with contextlib.suppress(psutil.Error):
        return [process.pid for process in psutil.Process().children(recursive=True)]
    return []
