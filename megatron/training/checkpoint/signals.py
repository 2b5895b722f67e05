"""Noticing that the run was asked to stop, so that it can save first."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


class StopSignal:
    """While entered, a signal is remembered and not obeyed; `seen` says whether it came.

    A process forked meanwhile (a worker that reads data) obeys it as it would without.
    """

    def __init__(self, name: str) -> None:
        self._number = signal.Signals[name]
        self._owner = os.getpid()
        self._before: Any = None
        self.seen = False

    def __enter__(self) -> StopSignal:
        self._before = signal.signal(self._number, self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(self._number, self._before)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.seen = True
