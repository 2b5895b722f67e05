"""How the ranks of a job agree to go on, or to stop, before any process group exists.

Every rank publishes what it has to say, or its error, under the name of the phase, and every rank
reads all of them. An error of any rank therefore ends all ranks, with one sentence, within seconds.
A rank that dies without a word is noticed by its silence: each beats a pulse while it lives. All of
it goes through the rendezvous store, which works while nothing else does.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import DistNetworkError

from hetero.errors import HeteroError, UserError
from hetero.waiting import Intervals, Waiting, name_ranks

_PULSE_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.1
_PATIENCE_WITH_AN_ERROR = 30.0
"""A rank that has to end anyway waits no longer for the others before it says why."""
_SILENCE_SECONDS = 15.0
"""A rank that was heard and then is not for so long has ended, or its host is stuck."""


class Store(Protocol):
    """The part of torch.distributed.Store that is used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


class AgreedError(UserError):
    """An error that every rank knows of; only rank 0 prints it."""

    known_to_all = True


class Agreement:
    """One rank's side of the agreement. `close` ends its pulse."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        timeout: float,
        place: str = "",
        intervals: Intervals | None = None,
    ) -> None:
        """`place` is where the ranks meet, in words; `intervals` are those of a wait's lines."""
        self._store = store
        self._at = f" at {place}" if place else ""
        self._intervals = intervals
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._over = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._pulse.start()

    def close(self) -> None:
        """The ranks have other ways now to notice each other's end."""
        self._over.set()

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
        records = self._collect(phase, error)
        self._raise_errors(records, cause=error)
        return [record["payload"] for record in records]

    def announce_failure(self, error: Exception) -> None:
        """Tell the others that this rank ends for a reason that no phase foresaw."""
        try:
            self._store.set(f"hetero/failed/{self._rank}", _sentence(error) or "")
        except Exception:  # the store is gone, and so are those who would have read it
            return

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Around what the ranks do together without this agreement, such as opening groups.

        Whoever is missing is named while it lasts; an error on the way is a UserError that names
        those who never came to it, if there are any.
        """
        mine = f"hetero/{{}}/{what}/{self._rank}"
        self._store.set(mine.format("began"), "1")
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(what, over), name=what, daemon=True)
        watch.start()
        try:
            yield
            self._store.set(mine.format("done"), "1")
        except HeteroError:
            raise
        except Exception as error:
            if absent := self._absent(f"began/{what}"):
                raise UserError(
                    f"{name_ranks(absent, self._world_size)} did not come to the {what}"
                    f"{self._at} in time; see its log, and whether it hangs"
                ) from error
            raise
        finally:
            over.set()

    def _watch(self, what: str, over: threading.Event) -> None:
        try:
            # A connection of its own: the other may be held by a wait of minutes.
            apart = copy.copy(self)
            apart._store = self._store.clone()  # type: ignore[attr-defined]
            waiting = Waiting(self._intervals)
            while not over.wait(_LONGEST_PAUSE_SECONDS):
                waiting.tell(lambda: apart._whom_to_open(what))
        except Exception:  # the store is gone; the main thread meets the same and reports it
            return

    def _whom(self, phase: str) -> str | None:
        """Whom the ranks wait for, if this is the first of those who do."""
        absent = self._absent(f"agree/{phase}")
        here = set(range(self._world_size)) - set(absent)
        if not absent or self._rank != min(here):
            return None
        return f"{name_ranks(absent, self._world_size)}{self._at}"

    def _whom_to_open(self, what: str) -> str | None:
        """The same of what is opened together: those who never came, or else are still at it."""
        absent, busy = self._absent(f"began/{what}"), self._absent(f"done/{what}")
        if self._rank != min(set(busy) - set(absent), default=None):
            return None
        verb = "come to" if absent else "finish"
        return f"{name_ranks(absent or busy, self._world_size)} to {verb} the {what}{self._at}"

    def _absent(self, kind: str) -> list[int]:
        keys = {rank: f"hetero/{kind}/{rank}" for rank in range(self._world_size)}
        return [rank for rank, key in keys.items() if not self._store.check([key])]

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

    def _beat(self) -> None:
        count = 0
        while not self._over.wait(_PULSE_SECONDS):
            count += 1
            try:
                self._store.set(f"hetero/pulse/{self._rank}", str(count))
            except Exception:  # the main thread meets the same and reports it
                return

    def _collect(self, phase: str, error: Exception | None) -> list[dict[str, Any]]:
        patience = self._timeout if error is None else min(self._timeout, _PATIENCE_WITH_AN_ERROR)
        deadline = time.monotonic() + patience
        waiting = Waiting(self._intervals)
        records: list[dict[str, Any]] = []
        for rank in range(self._world_size):
            try:
                self._wait_for(rank, phase, deadline, waiting)
                records.append(json.loads(self._store.get(self._key(phase, rank))))
            except DistNetworkError as failure:
                raise UserError(
                    f"rank {self._rank} lost the meeting point while the ranks compared their "
                    f"{phase}: rank 0 or the launcher that hosts it has ended; see its log"
                ) from failure
            except UserError:
                # What has been heard says more than who has not been.
                self._raise_errors(records)
                if error is not None:
                    raise UserError(_sentence(error)) from error
                raise
        return records

    def _wait_for(self, rank: int, phase: str, deadline: float, waiting: Waiting) -> None:
        """Wait for a rank's word of this phase, as long as it shows that it lives."""
        # Rank 0 speaks for all, unless it is the one that is missing.
        missing = UserError if rank == 0 else AgreedError
        pulse, heard = "", time.monotonic()
        while True:
            slice_seconds = min(_PULSE_SECONDS, max(0.05, deadline - time.monotonic()))
            if self._comes(self._key(phase, rank), slice_seconds):
                return
            waiting.tell(lambda: self._whom(phase))
            now = time.monotonic()
            if failed := self._read(f"hetero/failed/{rank}"):
                raise missing(f"rank {rank} failed: {failed}")
            beat = self._read(f"hetero/pulse/{rank}")
            if beat != pulse:
                pulse, heard = beat, now
            if pulse and now - heard > _SILENCE_SECONDS:
                raise missing(
                    f"rank {rank} ended, or its host hangs, while the ranks compared their "
                    f"{phase}; see its log"
                )
            if now > deadline:
                absent = name_ranks(self._absent(f"agree/{phase}"), self._world_size)
                raise missing(
                    f"{absent or f'rank {rank}'} did not come within {self._timeout:g} s while "
                    f"the ranks compared their {phase}; see whether it was started, can reach "
                    "rank 0's host, and what its own log says"
                )

    def _comes(self, key: str, seconds: float) -> bool:
        """Whether a key is set within so long. The store's own wait logs each time it is not."""
        deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
        while not self._store.check([key]):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return True

    def _read(self, key: str) -> str:
        """A key's value, empty where it is not set. Never waits."""
        return self._store.get(key).decode() if self._store.check([key]) else ""

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

    @staticmethod
    def _key(phase: str, rank: int) -> str:
        return f"hetero/agree/{phase}/{rank}"


def _sentence(error: Exception | None) -> str | None:
    return None if error is None else str(error) or type(error).__name__
