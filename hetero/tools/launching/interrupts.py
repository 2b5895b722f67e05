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
        with answered_afterwards(signal.SIGINT):
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def answered_afterwards(*numbers: signal.Signals) -> Iterator[None]:
    """Around the start of a process: signals that Python answers wait for the end of the block.

    Else a process may be there that nobody knows of, or that reads from a pipe which nobody writes.
    A signal that is blocked may reach another thread, and Python still answers in the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    answers = {number: answer for number in numbers if callable(answer := signal.getsignal(number))}
    for number in answers:
        signal.signal(number, lambda received, _: came.append(received))
    try:
        yield
    finally:
        for number, answer in answers.items():
            signal.signal(number, answer)
        if came:
            signal.raise_signal(came[0])
