"""The rendezvous store: the interface that is used of torch's, with deadlines and aborts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

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


class RendezvousStore(Store, Protocol):
    """And those that the agreement uses."""

    def add(self, key: str, amount: int) -> int: ...
    def append(self, key: str, value: str) -> None: ...
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


class StoreCall(Generic[_Result]):
    """An operation on the store in a thread of its own: Ctrl-C interrupts whoever waits for it."""

    def __init__(self, operation: Callable[[], _Result]) -> None:
        self._operation = operation
        self.done = threading.Event()
        self._result: _Result | None = None
        self._failure: Exception | None = None
        threading.Thread(target=self._run, name="store operation", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._operation()
        except Exception as failure:
            self._failure = failure
        self.done.set()

    def result(self) -> _Result:
        """What it has returned or raised. Call it once `done` is set."""
        if self._failure is not None:
            raise self._failure
        return self._result  # type: ignore[return-value]


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
        self._store: RendezvousStore = store
        self._seconds = seconds
        self._last: StoreCall[Any] | None = None

    def set(self, key: str, value: str) -> None:
        self._call(self._seconds, lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._call(self._seconds, lambda: self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        return self._call(self._seconds, lambda: self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        seconds = timeout.total_seconds() + self._seconds
        self._call(seconds, lambda: self._store.wait(keys, timeout))

    def add(self, key: str, amount: int) -> int:
        return self._call(self._seconds, lambda: self._store.add(key, amount))

    def append(self, key: str, value: str) -> None:
        self._call(self._seconds, lambda: self._store.append(key, value))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._call(
            self._seconds, lambda: self._store.compare_set(key, expected_value, desired_value)
        )

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._call(self._seconds, lambda: self._store.multi_get(keys))

    def _call(self, seconds: float, operation: Callable[[], _Result]) -> _Result:
        """Its result or exception. StoreUnresponsive if it, or the call before, does not end."""
        deadline = time.monotonic() + seconds
        if self._last is None or self._last.done.wait(seconds):
            self._last = call = StoreCall(operation)
            if call.done.wait(max(0.0, deadline - time.monotonic())):
                return _told_of_host(call)
        raise StoreUnresponsive(
            f"the process that hosts the store has not answered for {seconds:g} s; see whether "
            "rank 0, or the launcher that hosts the store, hangs, and whether its host is reached, "
            "by large packets too (compare the MTUs of NICs and switches)"
        )


def _told_of_host(call: StoreCall[_Result]) -> _Result:
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
    """A store whose waits call `check_abort` every second, and end when it raises."""

    def __init__(self, store: Store, check_abort: Callable[[], None]) -> None:
        self._store, self._check_abort = store, check_abort
        self.set, self.get, self.check = store.set, store.get, store.check

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Raises WaitAborted with the text of what `check_abort` raised."""
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
