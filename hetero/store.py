"""The rendezvous store: what is used of torch's, and a wait for one of its keys."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Protocol


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
    def clone(self) -> Any: ...


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
