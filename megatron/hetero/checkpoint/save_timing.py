"""How long saves kept training waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class SaveTiming:
    """One save on one rank; times in seconds."""

    iteration: int
    stood_still_s: float = 0.0
    """The time for which the training loop was blocked."""
    memory_wait_s: float = 0.0
    """The part of it spent waiting for snapshot memory."""
    written_s: float | None = None
    """From the start of the save until this rank's file was on disk; None if it failed."""
    bytes: int | None = None
    """The size of this rank's file; None if it failed."""


class SaveTimings:
    """All saves of a run. Time in `blocking` counts towards the save between `begin` and `end`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.saves: list[SaveTiming] = []
        self._clock = clock
        self._running: SaveTiming | None = None

    @property
    def total_s(self) -> float:
        """Seconds for which saves blocked training."""
        return sum(save.stood_still_s for save in self.saves)

    def begin(self, iteration: int) -> None:
        self._running = SaveTiming(iteration)
        self.saves.append(self._running)

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Count the body's time towards the running save, if there is one."""
        began = self._clock()
        try:
            yield
        finally:
            if self._running is not None:
                self._running.stood_still_s += self._clock() - began

    def end(
        self, *, memory_wait_s: float, written_s: float | None, bytes: int | None
    ) -> SaveTiming:
        """End the running save; returns its record."""
        if self._running is None:
            raise RuntimeError("a save ended that had not begun")
        ended, self._running = self._running, None
        ended.memory_wait_s, ended.written_s, ended.bytes = memory_wait_s, written_s, bytes
        return ended

    def as_json(self) -> dict[str, Any]:
        """The report's entries of a rank."""
        return {"saving_seconds": self.total_s, "saves": [asdict(save) for save in self.saves]}
