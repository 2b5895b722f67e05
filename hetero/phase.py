"""One phase of an agreement in the rendezvous store, and its outcome."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hetero.errors import AgreedError, AgreedFailure, UserError
from hetero.records import Record, pack, read_lines, unpack
from hetero.store import BoundedStore


class Phase:
    """The keys of one phase, and the operations of each rank on them."""

    def __init__(
        self,
        store: BoundedStore,
        number: int,
        what: str,
        world_size: int,
        *,
        is_section: bool = False,
    ) -> None:
        """`number` counts a job's phases, from 1; `is_section`: it is an `Agreement.section`."""
        self.number, self.what, self.is_section = number, what, is_section
        self._store, self._world_size = store, world_size
        self._began = time.monotonic()
        base = f"hetero/phase {number}"
        self._arrived_key, self._rank_0_key = f"{base}/arrived", f"{base}/rank 0"
        self._records_key, self.count_key = f"{base}/records", f"{base}/count"
        self.outcome_key = f"{base}/outcome"

    def arrive(self, rank: int) -> None:
        self._store.append(self._arrived_key, f"{rank}\n")
        if rank == 0:
            self._store.set(self._rank_0_key, "1")

    def submit(self, record: Record) -> int:
        """Append this rank's record; how many there are now. The last rank decides the outcome."""
        self._store.append(self._records_key, record.line())
        return int(self._store.add(self.count_key, 1))

    def decide(self, outcome: Mapping[str, Any]) -> dict[str, Any]:
        """Set the phase's outcome unless another rank has; return the one that is set."""
        return unpack(self._store.compare_set(self.outcome_key, "", pack(outcome)))

    def outcome(self) -> dict[str, Any] | None:
        """The outcome, once it is decided."""
        return self.read_outcome() if self._store.check([self.outcome_key]) else None

    def read_outcome(self) -> dict[str, Any]:
        """The outcome, which must be decided: one operation on the store less than `outcome`."""
        return unpack(self._store.get(self.outcome_key))

    def records(self) -> list[Record]:
        return read_lines(self._store.get(self._records_key))

    def rank_0_arrived(self) -> bool:
        return self._store.check([self._rank_0_key])

    @property
    def seconds(self) -> float:
        """Since this rank began it."""
        return time.monotonic() - self._began

    def absent(self) -> list[int]:
        """The ranks that have not arrived. One operation on the store."""
        arrived = {int(line) for line in self._store.get(self._arrived_key).split()}
        return sorted(set(range(self._world_size)) - arrived)

    def unfinished(self) -> list[int]:
        """The ranks that have not submitted a record."""
        has_any = self._store.check([self._records_key])
        done = {record.rank for record in self.records()} if has_any else set()
        return sorted(set(range(self._world_size)) - done)


def failure(text: str, *, agreed: bool, code: int = UserError.exit_code) -> dict[str, Any]:
    """The outcome of a phase that ends the job. `agreed`: rank 0 exists and will print it."""
    return {"error": text, "agreed": agreed, "code": code}


def raise_failure(outcome: Mapping[str, Any], *, cause: Exception | None) -> None:
    """Raise the error of an outcome that is a failure. `cause` is this rank's own error."""
    if "error" not in outcome:
        return
    text, agreed = outcome["error"], outcome["agreed"]
    if outcome["code"] == AgreedFailure.exit_code:
        raise AgreedFailure(text, known_to_all=agreed) from cause
    if agreed:
        raise AgreedError(text) from cause
    own = error_text(cause) if isinstance(cause, UserError) else None
    raise UserError(own or text) from cause


def error_text(error: Exception | None) -> str | None:
    """An error's message, or else its type; None without an error."""
    return None if error is None else str(error) or type(error).__name__
