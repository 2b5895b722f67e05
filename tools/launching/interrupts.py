"""Ctrl-C and the processes that a program starts: a terminal sends it to all of them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def children_ignore_interrupts() -> Iterator[None]:
    """Processes started here do not answer ctrl-C; whoever started them answers, and ends them.

    A ctrl-C during the block is answered after it. Python answers only in the main thread.
    """
    # It is started with the first process, and would let them through again.
    resource_tracker.ensure_running()
    # Blocked, and so inherited, rather than ignored: a process inherits no handler.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _answered_afterwards():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _answered_afterwards() -> Iterator[None]:
    """The signal may reach another thread, which does not block it: Python then still interrupts.

    A process half started would be left to read from a pipe that nobody writes any more.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def note(*_: object) -> None:
        nonlocal came
        came = True

    answer = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, answer)
        if came:
            signal.raise_signal(signal.SIGINT)
