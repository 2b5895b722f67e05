"""Sleeping on several descriptors at once, each with what to do when it has something to say."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress


class Poller:
    """One thread waits; any may wake it. Handlers change under the lock of the owner."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.attend(self._wake_fd, self._clear_wake)

    def attend(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.POLLIN)

    def ignore(self, descriptor: int | None) -> None:
        """Once is enough; None and what was never attended to are nothing."""
        if descriptor is not None and self._handlers.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def wait(self, seconds: float | None) -> list[int]:
        """Descriptors that have something to say; none when the time is over first."""
        ready = self._poll.poll(None if seconds is None else seconds * 1000)
        return [descriptor for descriptor, _ in ready]

    def handle(self, ready: list[int]) -> None:
        """Call the handlers of those that are still attended to."""
        for descriptor in ready:
            if (handler := self._handlers.get(descriptor)) is not None:
                handler()

    def close(self) -> None:
        os.close(self._wake_fd)

    def _clear_wake(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
