"""What every save of a run cost this rank. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class SaveCost:
    """One save as one rank saw it; times in seconds."""

    iteration: int
    stood_still_s: float = 0.0
    """For which the training loop did nothing else."""
    memory_wait_s: float = 0.0
    """The share of it that went into host memory for a copy."""
    written_s: float | None = None
    """From the save's begin until this rank's file was on the disk; None if it failed."""
    bytes: int | None = None
    """The size of this rank's file; None if it failed."""


class SaveCosts:
    """The saves of a run. Between `begin` and `end` of one, all time that stands still is its."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.saves: list[SaveCost] = []
        self._clock = clock
        self._running: SaveCost | None = None

    @property
    def total_s(self) -> float:
        """For which training stood still while checkpoints were saved."""
        return sum(save.stood_still_s for save in self.saves)

    def begin(self, iteration: int) -> None:
        self._running = SaveCost(iteration)
        self.saves.append(self._running)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Counts the block's time towards the save that runs, if one does."""
        began = self._clock()
        try:
            yield
        finally:
            if self._running is not None:
                self._running.stood_still_s += self._clock() - began

    def end(self, *, memory_wait_s: float, written_s: float | None, bytes: int | None) -> SaveCost:
        """The save that runs has ended; what it cost."""
        if self._running is None:
            raise RuntimeError("a save ended that had not begun")
        ended, self._running = self._running, None
        ended.memory_wait_s, ended.written_s, ended.bytes = memory_wait_s, written_s, bytes
        return ended

    def as_json(self) -> dict[str, Any]:
        """The report's entries of a rank."""
        return {"saving_seconds": self.total_s, "saves": [asdict(save) for save in self.saves]}
