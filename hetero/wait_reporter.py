"""Prints "waiting for ..." lines while a rank or a launcher waits for others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hetero.errors import print_line


@dataclass(frozen=True)
class WaitIntervals:
    """Seconds until a wait's first line, and between the later ones."""

    first: float = 10.0
    again: float = 30.0


class WaitReporter:
    """The lines of one wait."""

    def __init__(
        self,
        intervals: WaitIntervals | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._intervals = intervals or WaitIntervals()
        self._clock = clock
        self._say = say or print_line
        self._began = clock()
        self._due = self._intervals.first

    def report(self, whom: str | Callable[[], str | None]) -> None:
        """Print a line if one is due. A `whom` that returns None skips this one."""
        waited = self._clock() - self._began
        if waited < self._due:
            return
        again = self._intervals.again
        self._due = again * (waited // again + 1)
        if text := whom if isinstance(whom, str) else whom():
            self._say(f"waiting for {text}, {waited:.0f} s so far")
