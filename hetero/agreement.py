"""How the ranks of a job agree to go on, or to stop, before any process group exists.

Every rank publishes what it has to say, or its error, under the name of the phase, and every rank
reads all of them. An error of any rank therefore ends all ranks, with one sentence, within seconds.
All of it goes through the rendezvous store, which works while nothing else does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

from hetero.errors import UserError


class Store(Protocol):
    """The part of torch.distributed.Store that is used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


class AgreedError(UserError):
    """An error that every rank knows of; only rank 0 prints it."""

    known_to_all = True


class Agreement:
    """One rank's side of the agreement."""

    def __init__(self, store: Store, *, rank: int, world_size: int, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout

    def exchange(
        self,
        phase: str,
        *,
        payload: Mapping[str, Any] | None = None,
        error: Exception | None = None,
    ) -> list[dict[str, Any]]:
        """Tell the others this rank's payload or error; return every rank's payload.

        Raises AgreedError on every rank when any of them had an error or did not come in time.
        """
        mine = {"payload": dict(payload or {}), "error": _sentence(error)}
        self._store.set(self._key(phase, self._rank), json.dumps(mine))
        records = self._collect(phase)
        self._raise_errors(records, cause=error)
        return [record["payload"] for record in records]

    def _collect(self, phase: str) -> list[dict[str, Any]]:
        deadline = time.monotonic() + self._timeout
        records: list[dict[str, Any]] = []
        for rank in range(self._world_size):
            key = self._key(phase, rank)
            remaining = max(0.1, deadline - time.monotonic())
            try:
                self._store.wait([key], timedelta(seconds=remaining))
                records.append(json.loads(self._store.get(key)))
            except Exception as failure:
                # What has been heard says more than who has not been.
                self._raise_errors(records)
                # Rank 0 speaks for all, unless it is the one that is missing.
                missing = UserError if rank == 0 else AgreedError
                raise missing(
                    f"rank {self._rank} heard nothing from rank {rank} within "
                    f"{self._timeout:.0f} s while the ranks compared their {phase}; see whether it "
                    "was started, can reach this host, and what its own log says"
                ) from failure
        return records

    def _raise_errors(
        self, records: list[dict[str, Any]], *, cause: Exception | None = None
    ) -> None:
        errors: dict[str, list[int]] = {}
        for rank, record in enumerate(records):
            if record["error"]:
                errors.setdefault(record["error"], []).append(rank)
        if errors:
            raise AgreedError(self._combine(errors)) from cause

    def _combine(self, errors: Mapping[str, list[int]]) -> str:
        if len(errors) == 1:
            (text, ranks), *_ = errors.items()
            return text if len(ranks) == self._world_size else f"rank {ranks[0]}: {text}"
        return "; ".join(f"rank {ranks[0]}: {text}" for text, ranks in errors.items())

    def part(self, seconds: float = 10.0) -> None:
        """End together after an error that all ranks know of. Rank 0 has printed it by now.

        The others stay until it has, so that a launcher cannot end it first; and rank 0, which may
        be the store's host, stays until they have read what they came for. Nobody stays longer
        than `seconds`, whatever has become of the rest.
        """
        keys = ["hetero/parted/0"]
        if self._rank == 0:
            self._store.set(keys[0], "1")
            keys = [f"hetero/parted/{rank}" for rank in range(1, self._world_size)]
        try:
            if keys:
                self._store.wait(keys, timedelta(seconds=seconds))
            if self._rank > 0:
                self._store.set(f"hetero/parted/{self._rank}", "1")
        except Exception:  # the others are gone, and with them the reason to wait
            return

    @staticmethod
    def _key(phase: str, rank: int) -> str:
        return f"hetero/agree/{phase}/{rank}"


def _sentence(error: Exception | None) -> str | None:
    return None if error is None else str(error) or type(error).__name__
