"""Points in time that cost a step nothing: the host's clock, or events on the compute stream."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks points in time, and tells later how far they were apart."""

    def mark(self) -> Any:
        """Now, on this clock's line of time."""

    def milliseconds(self, begin: Any, end: Any) -> float:
        """From one mark that has passed to another."""

    def passed(self, mark: Any) -> bool:
        """Whether everything before the mark is done. Never blocks."""

    def wait(self, mark: Any) -> None:
        """Block until it has passed."""

    def release(self, marks: Iterable[Any]) -> None:
        """These marks are not needed any more."""


class HostClock:
    """Where the training thread itself computes and waits."""

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
    """Events on the current stream of a GPU, where kernels compute and receives are waited for.

    The time between two events is what the stream needed from one to the other: its kernels, and
    all for which it stood still, be it a link or a host that came late. Nothing is synchronised
    until somebody asks for the times.
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
