"""One phase of an agreement as it stands in the rendezvous store, and the outcome it comes to."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

from hetero.errors import AgreedError, AgreedFailure, UserError
from hetero.records import Record, pack, read_lines, unpack


class Store(Protocol):
    """What links and checks use of torch.distributed.Store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


class MeetingStore(Store, Protocol):
    """And what the agreement uses besides."""

    def add(self, key: str, amount: int) -> int: ...
    def append(self, key: str, value: str) -> None: ...
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def clone(self) -> Any: ...


class Phase:
    """One phase on the store: its keys, and what each rank does with them."""

    def __init__(self, store: MeetingStore, number: int, what: str, world_size: int) -> None:
        self.what, self._store, self._world_size = what, store, world_size
        base = f"hetero/phase {number}"
        self._records, self._came, self._done = f"{base}/records", f"{base}/came", f"{base}/done"
        self.count, self._rank_0 = f"{base}/count", f"{base}/rank 0"
        self._alarm = f"{base}/alarm"
        self.all, self.outcome = f"{base}/all", f"{base}/outcome"

    def come(self, rank: int) -> None:
        self._store.append(self._came, f"{rank}\n")
        if rank == 0:
            self._store.set(self._rank_0, "1")

    def tell(self, record: Record) -> None:
        self._store.append(self._records, record.line())
        if self._counted():
            self._store.set(self.all, "1")

    def finish(self, rank: int) -> None:
        self._store.append(self._done, f"{rank}\n")
        if self._counted():
            self.settle({"columns": {}})

    def _counted(self) -> bool:
        """Whether this was the last of all ranks."""
        return self._store.add(self.count, 1) >= self._world_size

    def settle(self, outcome: Mapping[str, Any]) -> dict[str, Any]:
        """The phase's outcome: this one, unless another rank has been first."""
        settled = unpack(self._store.compare_set(self.outcome, "", pack(outcome)))
        if "error" in outcome:  # Rank 0 may wait for the last rank.
            self._store.set(self.all, "1")
        return settled

    def settled(self) -> dict[str, Any] | None:
        return self.read_outcome() if self._store.check([self.outcome]) else None

    def read_outcome(self) -> dict[str, Any]:
        """Once it is there."""
        return unpack(self._store.get(self.outcome))

    def records(self) -> list[Record]:
        return read_lines(self._store.get(self._records))

    def rank_0_came(self) -> bool:
        return self._store.check([self._rank_0])

    def raise_alarm(self) -> None:
        self._store.set(self._alarm, "1")

    def alarmed(self) -> bool:
        return self._store.check([self._alarm])

    def absent(self) -> list[int]:
        """The ranks that have not come. One operation."""
        return sorted(set(range(self._world_size)) - self._roll(self._came))

    def busy(self) -> list[int]:
        """The ranks that have not finished."""
        done = self._roll(self._done) if self._store.check([self._done]) else set()
        return sorted(set(range(self._world_size)) - done)

    def _roll(self, key: str) -> set[int]:
        return {int(line) for line in self._store.get(key).split()}


class Awaited:
    """A key that is waited for in a thread of its own, so that ctrl-C reaches the main thread."""

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


def ended(text: str, *, agreed: bool, code: int = UserError.exit_code) -> dict[str, Any]:
    """The outcome of a phase that ends the job. `agreed`: rank 0 is there to print it."""
    return {"error": text, "agreed": agreed, "code": code}


def raise_error(outcome: Mapping[str, Any], *, cause: Exception | None) -> None:
    """Raise what an outcome ends the job with, if it does. `cause` is this rank's own error."""
    if "error" not in outcome:
        return
    text, agreed = outcome["error"], outcome["agreed"]
    if outcome["code"] == AgreedFailure.exit_code:
        raise AgreedFailure(text, known_to_all=agreed) from cause
    if agreed:
        raise AgreedError(text) from cause
    own = sentence(cause) if isinstance(cause, UserError) else None
    raise UserError(own or text) from cause


def sentence(error: Exception | None) -> str | None:
    """What an error says, if there is one."""
    return None if error is None else str(error) or type(error).__name__
