"""Catches the signal that asks the run to stop, so that it saves first."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


class StopSignal:
    """A context manager in which a signal only sets `seen`.

    In forked processes, such as data loader workers, it has its default effect.
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
