"""One phase of an agreement as it stands in the rendezvous store, and the outcome it comes to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hetero.errors import AgreedError, AgreedFailure, UserError
from hetero.records import Record, pack, read_lines, unpack
from hetero.store import RendezvousStore


class Phase:
    """One phase on the store: its keys, and what each rank does with them."""

    def __init__(self, store: RendezvousStore, number: int, what: str, world_size: int) -> None:
        """`number` counts a job's phases, from 1."""
        self.number, self.what = number, what
        self._store, self._world_size = store, world_size
        self._began = time.monotonic()
        base = f"hetero/phase {number}"
        self._records, self._came, self._done = f"{base}/records", f"{base}/came", f"{base}/done"
        self.count, self._rank_0 = f"{base}/count", f"{base}/rank 0"
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

    @property
    def seconds(self) -> float:
        """Since this rank began it."""
        return time.monotonic() - self._began

    def absent(self) -> list[int]:
        """The ranks that have not come. One operation."""
        return sorted(set(range(self._world_size)) - self._roll(self._came))

    def busy(self) -> list[int]:
        """The ranks that have not finished."""
        done = self._roll(self._done) if self._store.check([self._done]) else set()
        return sorted(set(range(self._world_size)) - done)

    def _roll(self, key: str) -> set[int]:
        return {int(line) for line in self._store.get(key).split()}


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
