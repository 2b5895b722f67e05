"""The rendezvous store: the interface that is used of torch's, with deadlines and aborts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

from torch.distributed import DistNetworkError, DistStoreError

from hetero.errors import LinkError

_Result = TypeVar("_Result")
_POLL_SECONDS = 1.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1


class Store(Protocol):
    """The methods of torch.distributed.Store that links and checks use."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


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


class StoreUnresponsive(DistNetworkError):
    """The process that hosts the store exists, but does not answer."""


class StoreHostEnded(DistNetworkError):
    """The process that hosts the store has ended, or its network is lost."""


class BoundedStore:
    """A store whose operations have a deadline each. StoreUnresponsive where one does not end.

    torch's client itself waits for ever if the host is stopped, its network is gone, or something
    else listens there. So each operation has a thread, which is abandoned at the deadline.
    """

    def __init__(self, store: Any, *, seconds: float) -> None:
        """`store` is one of torch's."""
        self._store = store
        self._seconds = seconds
        self._last: Future[Any] | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """An operation of the store: `set`, `get`, `add`, ..."""
        operation = getattr(self._store, name)
        return lambda *arguments: self._call(self._seconds, partial(operation, *arguments))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        seconds = timeout.total_seconds() + self._seconds
        self._call(seconds, lambda: self._store.wait(keys, timeout))

    def _call(self, seconds: float, operation: Callable[[], Any]) -> Any:
        """Its result or exception. StoreUnresponsive if it, or the call before, does not end."""
        deadline = time.monotonic() + seconds
        if self._last is None or futures.wait([self._last], seconds).done:
            self._last = call = in_thread(operation)
            if futures.wait([call], deadline - time.monotonic()).done:
                return _told_of_host(call)
        raise StoreUnresponsive(
            f"the process that hosts the store has not answered for {seconds:g} s; see whether "
            "rank 0, or the launcher that hosts the store, hangs, and whether its host is reached, "
            "by large packets too (compare the MTUs of NICs and switches)"
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


class WaitAborted(LinkError):
    """A wait for a key was aborted; the cause is the exception of `check_abort`."""


class AbortableStore:
    """A store whose waits call `check_abort` every second, and end when it raises.

    They end by a signal too: torch's own are one call into C++, which none interrupts.
    """

    def __init__(self, store: Any, check_abort: Callable[[], None] = lambda: None) -> None:
        """`store` is one of torch's, or a BoundedStore."""
        self._store, self._check_abort = store, check_abort
        self.set, self.get, self.check = store.set, store.get, store.check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Raises WaitAborted with the text of what `check_abort` raised."""
        timeout = self._store.timeout if timeout is None else timeout
        began = time.monotonic()
        deadline, next_check = began + timeout.total_seconds(), began + _POLL_SECONDS
        pause = _SHORTEST_PAUSE
        # Poll instead of the store's own wait, which logs two warnings whenever it times out.
        while not self._store.check(keys):
            now = time.monotonic()
            if now >= min(deadline, next_check):
                try:
                    self._check_abort()
                except Exception as reason:
                    raise WaitAborted(str(reason)) from reason
                next_check = now + _POLL_SECONDS
            if now >= deadline:
                raise DistStoreError(f"{', '.join(keys)} did not come within {timeout}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
