"""The rendezvous store: torch's, with deadlines and aborts."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore

from hetero.errors import LinkError, print_line

_Result = TypeVar("_Result")
ANSWER_SECONDS = 60.0
"""For a store to answer one operation."""
_POLL_SECONDS = 1.0
_LONGER = timedelta(seconds=60.0)
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1

FIRST_SECONDS, AGAIN_SECONDS = 10.0, 30.0
"""Until a wait's first line, and between the later ones."""
_LISTENER_PAUSE_SECONDS = 0.1


def host_of(store: Store) -> str:
    """The host of a store, which every rank reaches; MASTER_ADDR for a store without one."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return str(store.host)
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def in_thread(operation: Callable[[], _Result]) -> Future[_Result]:
    """Start an operation in a thread of its own: Ctrl-C interrupts whoever waits for it.

    The process may end meanwhile, which threads of an executor would hold up.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(operation())
        except Exception as failure:
            future.set_exception(failure)

    threading.Thread(target=run, name="store operation", daemon=True).start()
    return future


class StoreHostEnded(DistNetworkError):
    """The process that hosts the store has ended, or its network is lost."""


class BoundedStore:
    """A store whose operations have a deadline each. DistNetworkError where one does not end.

    torch's client itself waits for ever if the host is stopped, its network is gone, or something
    else listens there. So each operation has a thread, which is abandoned at the deadline.
    """

    def __init__(
        self, store: Any, *, seconds: float = ANSWER_SECONDS, waits_on: Any = None
    ) -> None:
        """
        Args:
            store: any store of torch's.
            seconds: for the store to answer one operation.
            waits_on: the same store over a connection (`clone`) that only `wait` of this object
                uses, one at a time: the store's own wait blocks its connection, and costs one
                operation. Without it `wait` polls.
        """
        self._store, self._seconds, self._waits_on = store, seconds, waits_on
        self._last: Future[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        """An operation of the store: `set`, `get`, `add`, ...; or its `timeout`."""
        attribute = getattr(self._store, name)
        if not callable(attribute):
            return attribute
        return lambda *arguments: self._call(partial(attribute, *arguments))

    def wait(
        self,
        keys: list[str],
        timeout: timedelta | None = None,
        *,
        check_abort: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for all keys. DistStoreError if they do not come in time.

        `check_abort` is called every second, and may raise to end it.
        """
        timeout = self._store.timeout if timeout is None else timeout
        began = time.monotonic()
        deadline, next_check = began + timeout.total_seconds(), began + _POLL_SECONDS
        pause = _SHORTEST_PAUSE
        native: Future[Any] | None = None
        if self._waits_on is not None:
            # Longer than the caller waits: the store logs two warnings whenever a wait times out.
            native = in_thread(partial(self._waits_on.wait, keys, timeout + _LONGER))
        while not (self.check(keys) if native is None else native.done()):
            now = time.monotonic()
            if now >= min(deadline, next_check):
                check_abort()
                next_check = now + _POLL_SECONDS
            if now >= deadline:
                raise DistStoreError(f"{', '.join(keys)} did not come within {timeout}")
            if native is not None:
                futures.wait([native], min(deadline, next_check) - now)
                continue
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if native is not None:
            _told_of_host(native)

    def _call(self, operation: Callable[[], Any]) -> Any:
        """Its result or exception. DistNetworkError if it, or the call before, does not end."""
        deadline = time.monotonic() + self._seconds
        if self._last is None or futures.wait([self._last], self._seconds).done:
            self._last = call = in_thread(operation)
            if futures.wait([call], deadline - time.monotonic()).done:
                return _told_of_host(call)
        raise DistNetworkError(
            f"the process that hosts the store has not answered for {self._seconds:g} s; see "
            "whether rank 0, or the launcher that hosts the store, hangs, and whether its host is "
            "reached, by large packets too (compare the MTUs of NICs and switches)"
        )


def _told_of_host(call: Future[_Result]) -> _Result:
    """Its result or exception: torch's own text says "Broken pipe" where the host has ended."""
    try:
        return call.result()
    except DistNetworkError as error:
        raise StoreHostEnded(
            "the process that hosts the store, rank 0 or the launcher, has ended, or its network "
            "is lost; see its log, and keep it until all ranks have ended"
        ) from error


def over_own_connection(store: Any, *, seconds: float = ANSWER_SECONDS) -> Any:
    """The same store over a new connection: a wait blocks all other users of its connection.

    Raises DistNetworkError if it does not answer within `seconds`: PyTorch tries for minutes to
    connect to one that has gone.
    """
    BoundedStore(store, seconds=seconds).check(["host"])
    return store.clone()


@contextmanager
def as_link_error(failed: str) -> Iterator[None]:
    """Have a store that is lost, or does not answer, end what it is needed for with a LinkError."""
    try:
        yield
    except DistNetworkError as error:
        raise LinkError(f"{failed}: {error}") from error


class WaitReporter:
    """Prints, from time to time, whom this process waits for."""

    def __init__(self) -> None:
        self._began, self._due = time.monotonic(), FIRST_SECONDS

    @property
    def seconds(self) -> float:
        """Since the wait began."""
        return time.monotonic() - self._began

    def report(self, whom: str | Callable[[], str | None]) -> None:
        """Print a line if one is due. A `whom` that returns None skips this one."""
        waited = self.seconds
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
        time.sleep(_LISTENER_PAUSE_SECONDS)
