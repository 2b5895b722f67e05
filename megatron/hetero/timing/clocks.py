"""Clocks that do not synchronise: the host's clock, or CUDA events on the compute stream."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Records marks, and measures the time between them later."""

    def mark(self) -> Any:
        """Record the current point in time."""

    def milliseconds(self, begin: Any, end: Any) -> float:
        """Time between two completed marks."""

    def passed(self, mark: Any) -> bool:
        """Whether a mark has completed. Never blocks."""

    def wait(self, mark: Any) -> None:
        """Block until a mark has completed."""

    def release(self, marks: Iterable[Any]) -> None:
        """Return marks for reuse."""


class HostClock:
    """The host's clock, for CPU training."""

    def mark(self) -> float:
        return time.perf_counter()

    def milliseconds(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3

    def passed(self, mark: float) -> bool:
        return True

    def wait(self, mark: float) -> None:
        pass

    def release(self, marks: Iterable[float]) -> None:
        pass


class StreamClock:
    """CUDA events on a GPU's current stream.

    The time between two events includes the stream's kernels and all its waits, for links and for a
    host that is late. Nothing is synchronised until times are read.
    """

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end))

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def release(self, marks: Iterable[torch.cuda.Event]) -> None:
        self._free.extend(marks)


def clock_of(device: torch.device) -> Clock:
    return StreamClock() if device.type == "cuda" else HostClock()
