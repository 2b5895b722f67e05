"""Prints "waiting for ..." lines while a rank or a launcher waits for others, or for a port."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial

from hetero.errors import print_line

FIRST_SECONDS, AGAIN_SECONDS = 10.0, 30.0
"""Until a wait's first line, and between the later ones."""
_PAUSE_SECONDS = 0.1


class WaitReporter:
    """The lines of one wait."""

    def __init__(self) -> None:
        self._began, self._due = time.monotonic(), FIRST_SECONDS

    def report(self, whom: str | Callable[[], str | None]) -> None:
        """Print a line if one is due. A `whom` that returns None skips this one."""
        waited = time.monotonic() - self._began
        if waited < self._due:
            return
        self._due = AGAIN_SECONDS * (waited // AGAIN_SECONDS + 1)
        if text := whom if isinstance(whom, str) else whom():
            print_line(f"waiting for {text}, {waited:.0f} s so far")


def await_listener(
    host: str,
    port: int,
    *,
    seconds: float,
    who: Callable[[OSError], str | None],
    check_abort: Callable[[], None] = lambda: None,
) -> None:
    """Wait until the port accepts connections: TCPStore's own retries would flood the log.

    Reports `who` is waited for, given why it is not there. Raises the last error after `seconds`.
    `check_abort` is called after each try, and may raise to end the wait.
    """
    waiting, deadline = WaitReporter(), time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((host, port), timeout=5.0):
                return
        except OSError as error:
            waiting.report(partial(who, error))
            if time.monotonic() > deadline:
                raise
        check_abort()
        time.sleep(_PAUSE_SECONDS)
