"""The rendezvous store: what is used of torch's, a wait for one of its keys, and deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from torch.distributed import DistNetworkError, DistStoreError

_Result = TypeVar("_Result")
_LOOK_SECONDS = 1.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1


class Store(Protocol):
    """What links and checks use of torch.distributed.Store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


class RendezvousStore(Store, Protocol):
    """And what the agreement uses besides."""

    def add(self, key: str, amount: int) -> int: ...
    def append(self, key: str, value: str) -> None: ...
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


class StoreWait:
    """A wait for a key, in a thread of its own, so that ctrl-C reaches the main thread."""

    def __init__(self, store: Store, key: str, seconds: float) -> None:
        self._store, self._key, self._seconds = store, key, seconds
        self.over = threading.Event()
        self._failure: Exception | None = None
        threading.Thread(target=self._wait, name=f"wait for {key}", daemon=True).start()

    def _wait(self) -> None:
        try:
            self._store.wait([self._key], timedelta(seconds=self._seconds))
        except Exception as failure:
            self._failure = failure
        self.over.set()

    def require(self) -> None:
        """Raise what the wait ended with, unless the key is there."""
        if self._failure is not None:
            raise self._failure


class StoreSilent(DistNetworkError):
    """The process that hosts the store is there, and answers nothing."""


class BoundedStore:
    """A store of which no operation takes longer than the caller allows."""

    def __init__(self, store: Any, *, seconds: float) -> None:
        """`store` is one of torch's."""
        self._store: RendezvousStore = store
        self._seconds = seconds
        self._within = BoundedCalls().within

    def set(self, key: str, value: str) -> None:
        self._within(self._seconds, lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._within(self._seconds, lambda: self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        return self._within(self._seconds, lambda: self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        seconds = timeout.total_seconds() + self._seconds
        self._within(seconds, lambda: self._store.wait(keys, timeout))

    def add(self, key: str, amount: int) -> int:
        return self._within(self._seconds, lambda: self._store.add(key, amount))

    def append(self, key: str, value: str) -> None:
        self._within(self._seconds, lambda: self._store.append(key, value))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._within(
            self._seconds, lambda: self._store.compare_set(key, expected_value, desired_value)
        )

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._within(self._seconds, lambda: self._store.multi_get(keys))


class BoundedCalls:
    """Calls of torch's client of a store, none of which takes longer than the caller allows.

    It waits without end for the answer of a host that has been stopped, whose network has gone, or
    where something else listens. Here each call is a thread's, which is left behind with its wait.
    """

    def __init__(self) -> None:
        self._running: threading.Thread | None = None

    def within(self, seconds: float, operation: Callable[[], _Result]) -> _Result:
        """Its result, or what it raises. StoreSilent where it, or the one before, does not end."""
        deadline = time.monotonic() + seconds
        if (before := self._running) is not None:
            before.join(seconds)
            if before.is_alive():
                raise self._silent(seconds)
        ended: list[tuple[_Result | None, Exception | None]] = []

        def run() -> None:
            try:
                ended.append((operation(), None))
            except Exception as error:
                ended.append((None, error))

        thread = threading.Thread(target=run, name="store operation", daemon=True)
        thread.start()
        self._running = thread
        thread.join(max(0.0, deadline - time.monotonic()))
        if not ended:
            raise self._silent(seconds)
        result, error = ended[0]
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    @staticmethod
    def _silent(seconds: float) -> StoreSilent:
        return StoreSilent(
            f"the process that hosts the store has not answered for {seconds:g} s; see whether "
            "rank 0, or the launcher that hosts the store, hangs, and whether its host is reached"
        )


class GivenUp(Exception):
    """A wait for a key was given up; the cause is what said so."""


class WatchedStore:
    """A store whose waits are given up when `look`, which they call every second, raises."""

    def __init__(self, store: Store, look: Callable[[], None]) -> None:
        self._store, self._look = store, look
        self.set, self.get, self.check = store.set, store.get, store.check

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Raises GivenUp with what `look` said."""
        began = time.monotonic()
        deadline, next_look = began + timeout.total_seconds(), began + _LOOK_SECONDS
        pause = _SHORTEST_PAUSE
        # Not the store's own wait, which logs two warnings whenever it ends without the key.
        while not self._store.check(keys):
            now = time.monotonic()
            if now >= min(deadline, next_look):
                try:
                    self._look()
                except Exception as reason:
                    raise GivenUp(str(reason)) from reason
                next_look = now + _LOOK_SECONDS
            if now >= deadline:
                raise DistStoreError(f"{', '.join(keys)} did not come within {timeout}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
