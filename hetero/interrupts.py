"""Ctrl-C and the processes that a program starts: a terminal sends it to all of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def children_ignore_interrupts() -> Iterator[None]:
    """Processes started here do not answer ctrl-C; whoever started them answers, and ends them."""
    # It is started with the first process, and would let them through again.
    resource_tracker.ensure_running()
    # Blocked, and so inherited, rather than ignored: one that comes now reaches us afterwards.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
