"""Exchanges between ranks before any process group exists: values, errors and a deadline.

Every rank appends its payload, or its error, to one value of the rendezvous store. The last rank
folds all of them into the outcome of the exchange and thereby wakes the others. An error of any
rank ends all of them, with one sentence, within seconds. So does a rank that exits without
reporting one, which `hetero.startup.liveness` sees. The outcome is set once, by whichever rank is
first, and every rank reads the same.

Each rank does the same number of store operations per exchange, however many ranks there are.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import astuple, dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from torch.distributed import DistError, DistNetworkError, DistStoreError

from hetero.errors import (
    AgreedError,
    AgreedFailure,
    ExchangeError,
    HeteroError,
    StoreLost,
    UserError,
    print_line,
)
from hetero.startup.liveness import Liveness, LocalRanks, ended_early
from hetero.startup.store import ANSWER_SECONDS, BoundedStore, StoreUnresponsive, in_thread
from hetero.text import counted, name_ranks, spans

_MOST_ERRORS = 3
"""Different ones that an error repeats."""
_TIMEOUT_WITH_AN_ERROR = 30.0
"""How long a rank that has an error, and so must end, waits for the others before it reports it."""
_CAUSE_SECONDS = 4.0
"""How long a rank that failed waits to learn whether another rank's failure is the cause."""
_GRACE_SECONDS = 5.0
"""Added to the timeout of other ranks once rank 0, with the same timeout, is there to report."""


class Exchange:
    """One exchange of values between the members of a job, a group or a pair, over a store.

    Each member submits a JSON mapping, or an error. The last to submit folds what all of them
    submitted into the outcome, which is set once and which all read: every member's value, or one
    error. A member that has waited for too long, or whose `check` raises, sets the outcome to that
    error instead, so all members that come raise the same.

        values = Exchange(store, "addresses", member=rank, size=size).run(
            {"address": own}, timeout=60.0, check=require_peers_alive
        )

    Each member makes the same number of store operations, however many members there are: two to
    submit, and to wait a wait and a get (the last: a get and a compare_set). `arrive` is one more.

    Use it from one thread at a time. Each exchange needs a `key` of its own in the store.
    """

    def __init__(
        self,
        store: Any,
        what: str,
        *,
        member: int,
        size: int,
        key: str = "",
        endpoint: str = "",
        name_members: Callable[[Sequence[int]], str] = spans,
        remedy: str = "see whether it was started, and what its own log says",
    ) -> None:
        """
        Args:
            store: any store of torch's, or a BoundedStore, whose deadlines then hold.
            what: is exchanged, as errors name it: a plural such as "addresses".
            member: the number of this member, from 0 to `size` - 1.
            key: prefix of its keys in the store, the same on all members; `what` by default.
            endpoint: of the store, as errors name it.
            name_members: how errors name members; by default as ranks.
            remedy: ends the error that names missing members.
        """
        self.what = what
        self._store = store if isinstance(store, BoundedStore) else BoundedStore(store)
        self._member, self._size = member, size
        self._name_members, self._remedy = name_members, remedy
        self._at = f" at {endpoint}" if endpoint else ""
        key = key or what
        self._arrived_key, self._values_key = f"{key}/arrived", f"{key}/values"
        self._count_key, self._outcome_key = f"{key}/count", f"{key}/outcome"
        self._error: Exception | None = None
        self._outcome: dict[str, Any] | None = None

    def run(
        self,
        value: Mapping[str, Any] | None = None,
        *,
        error: Exception | None = None,
        timeout: float,
        check: Callable[[], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Submit, then wait: see there."""
        self.submit(value, error=error)
        return self.wait(timeout, check=check)

    def arrive(self) -> None:
        """Optional: say that this member is there, and will submit later.

        Until it has, `absent` does not list it, and an error says that it "did not answer".
        """
        with self._storing():
            self._store.append(self._arrived_key, f"{self._member}\n")

    def submit(
        self, value: Mapping[str, Any] | None = None, *, error: Exception | None = None
    ) -> None:
        """Submit this member's value or error, once, without waiting for others.

        Values of one name that are the same JSON for all members travel once.
        """
        self._error = error
        record = _Record.of(self._member, self.what, value, error)
        with self._storing():
            self._store.append(self._values_key, record.line())
            count = int(self._store.add(self._count_key, 1))
            if count == self._size:
                self._outcome = self._decide(self._folded(self._records(are_any=True)))
        if count > self._size:
            raise ExchangeError(
                f"more than {counted(self._size, 'process', 'processes')} came{self._at} to "
                f"exchange {self.what}; if another job uses this store, give each job its own port "
                "(--master-port), else give each process its own rank",
                exit_code=UserError.exit_code,
            )

    def wait(
        self, timeout: float, *, check: Callable[[], None] | None = None
    ) -> list[dict[str, Any]]:
        """Wait for the outcome; return every member's value, in the order of members.

        Never modify what is in them: equal values are the same object.

        Args:
            timeout: seconds from now.
            check: called about once a second while waiting. A HeteroError that it raises ends the
                exchange with its text, exit code and `known_to_all`, for all members.

        Raises:
            ExchangeError: a member submitted an error or did not submit in time, `check` raised, or
                the store is lost.
        """
        with self._storing():
            outcome = self._outcome or self._await(timeout, check)
        if (failure := self._failure_in(outcome)) is not None:
            raise failure from self._error
        return unfold(outcome["columns"], self._size)

    def failure(self) -> ExchangeError | None:
        """The error with which the exchange has ended; None if it has not, or not with an error."""
        with self._storing():
            if self._outcome is None and self._store.check([self._outcome_key]):
                self._outcome = unpack(self._store.get(self._outcome_key))
            return None if self._outcome is None else self._failure_in(self._outcome)

    def has_begun(self) -> bool:
        """Whether any member has submitted. One small store operation, for members that poll."""
        with self._storing():
            return bool(self._store.check([self._count_key]))

    def submitted(self) -> dict[int, dict[str, Any]]:
        """What members have submitted so far, first come first; {} of one with an error."""
        with self._storing():
            records = self._records()
        values = unfold(fold(records), len(records))
        return {record.member: value for record, value in zip(records, values, strict=True)}

    def missing(self) -> list[int]:
        """The members that have submitted nothing yet. Reads all that the others have."""
        with self._storing():
            return self._missing_in(self._records())

    def absent(self) -> list[int]:
        """The members that have not called `arrive`. Reads a small value."""
        with self._storing():
            has_any = self._store.check([self._arrived_key])
            arrived = self._store.get(self._arrived_key).split() if has_any else []
        return sorted(set(range(self._size)) - set(map(int, arrived)))

    def abort(self, error: HeteroError) -> ExchangeError | None:
        """End the exchange for all members with an error, unless it has ended already.

        Returns the error with which it has ended; None if all have submitted a value.
        """
        with self._storing():
            self._outcome = self._decide(self._failed(error))
        return self._failure_in(self._outcome)

    def _await(self, timeout: float, check: Callable[[], None] | None) -> dict[str, Any]:
        limit = timedelta(seconds=max(0.0, timeout))
        try:
            self._store.wait([self._outcome_key], limit, check_abort=check or (lambda: None))
            return unpack(self._store.get(self._outcome_key))
        except DistStoreError:
            return self._decide(self._timed_out(timeout))
        except HeteroError as error:
            # A member may have submitted its value and then ended, before it could set the outcome.
            return self._decide(self._failed(error))

    def _decide(self, outcome: Mapping[str, Any]) -> dict[str, Any]:
        """Set the outcome unless another member has; return the one that is set."""
        return unpack(self._store.compare_set(self._outcome_key, "", pack(outcome)))

    def _records(self, *, are_any: bool = False) -> list[_Record]:
        """What has been submitted, first come first. One operation less if `are_any` are."""
        if not (are_any or self._store.check([self._values_key])):
            return []
        return [
            _Record(*json.loads(line)) for line in self._store.get(self._values_key).splitlines()
        ]

    def _missing_in(self, records: Iterable[_Record]) -> list[int]:
        return sorted(set(range(self._size)) - {record.member for record in records})

    def _folded(self, records: Sequence[_Record]) -> dict[str, Any]:
        """The outcome when all have submitted."""
        first = records[0]
        if other := [record for record in records if record.what != first.what]:
            text = (
                f"{self._name_members([other[0].member])} exchanges {other[0].what} while "
                f"{self._name_members([first.member])} exchanges {first.what}; start both with "
                "the same flags and the same version of this project"
            )
            return _failure(text, code=UserError.exit_code, known_to_all=True)
        if self._missing_in(records):
            members = [record.member for record in records]
            twice = next(member for member in members if members.count(member) > 1)
            text = (
                f"two processes say that they are {self._name_members([twice])}{self._at}; give "
                "each process its own rank, and each job its own port (--master-port)"
            )
            return _failure(text, code=UserError.exit_code, known_to_all=True)
        if any(record.error is not None for record in records):
            return self._errors_of(records, known_to_all=True)
        return {"columns": fold(sorted(records, key=lambda record: record.member))}

    def _failed(self, error: HeteroError) -> dict[str, Any]:
        """The outcome when a `check` has raised: its error after those that were submitted."""
        records = self._records()
        missing = self._missing_in(records)
        if not missing:
            return self._folded(records)
        texts = _texts(records)
        told = [*([self._combined(texts)] if texts else []), str(error)]
        return _failure(
            "; ".join(told),
            code=error.exit_code,
            known_to_all=error.known_to_all,
            errors=texts,
            missing=missing,
        )

    def _timed_out(self, timeout: float) -> dict[str, Any]:
        """The outcome at the timeout: errors that were submitted, or else the missing members."""
        records = self._records()
        missing = self._missing_in(records)
        if not missing:
            return self._folded(records)
        absent = sorted(set(missing) & set(self.absent()))
        known_to_all = 0 not in (absent or missing)
        if any(record.error is not None for record in records):
            return self._errors_of(records, known_to_all=known_to_all)
        verb = "come" if absent else "answer"
        text = (
            f"{self._name_members(absent or missing)} did not {verb}{self._at} within {timeout:g} "
            f"s to exchange {self.what}; {self._remedy}"
        )
        return _failure(text, code=UserError.exit_code, known_to_all=known_to_all, missing=missing)

    def _errors_of(self, records: Sequence[_Record], *, known_to_all: bool) -> dict[str, Any]:
        """The outcome when members have submitted errors."""
        texts = _texts(records)
        return _failure(
            self._combined(texts),
            code=next(record.code for record in records if record.error is not None),
            known_to_all=known_to_all,
            errors=texts,
            missing=self._missing_in(records),
        )

    def _combined(self, texts: Mapping[int, str]) -> str:
        """The errors of members as one sentence. Equal ones are told once."""
        members: dict[str, list[int]] = {}
        for member, text in sorted(texts.items()):
            members.setdefault(text, []).append(member)
        if len(members) == 1 and len(texts) == self._size:
            return next(iter(members))
        parts = [f"{self._name_members(those[:1])}: {text}" for text, those in members.items()]
        more = f"; and {len(parts) - _MOST_ERRORS} more" if len(parts) > _MOST_ERRORS else ""
        return "; ".join(parts[:_MOST_ERRORS]) + more

    def _failure_in(self, outcome: Mapping[str, Any]) -> ExchangeError | None:
        """The error that an outcome is; None if it is every member's value."""
        if "columns" in outcome:
            return None
        text = outcome["error"]
        if not outcome["known_to_all"] and isinstance(self._error, HeteroError):
            text = str(self._error) or text  # each member reports its own
        return ExchangeError(
            text,
            errors=dict(outcome["errors"]),
            missing=outcome["missing"],
            exit_code=outcome["code"],
            known_to_all=outcome["known_to_all"],
        )

    @contextlib.contextmanager
    def _storing(self) -> Iterator[None]:
        try:
            yield
        except DistNetworkError as error:
            raise ExchangeError(
                f"the store{self._at} was lost while {self.what} were exchanged: {error}",
                store_lost=True,
            ) from error


@dataclass(frozen=True)
class _Record:
    """What one member submitted."""

    member: int
    what: str
    fields: dict[str, str]
    """By name; values as JSON, so that equal ones are decoded once."""
    error: str | None
    code: int

    @classmethod
    def of(
        cls, member: int, what: str, value: Mapping[str, Any] | None, error: Exception | None
    ) -> _Record:
        fields = {name: json.dumps(field) for name, field in (value or {}).items()}
        code = error.exit_code if isinstance(error, HeteroError) else HeteroError.exit_code
        return cls(member, what, fields, error_text(error), code)

    def line(self) -> str:
        return json.dumps(astuple(self)) + "\n"


def _texts(records: Iterable[_Record]) -> dict[int, str]:
    """The errors among them, by member."""
    return {record.member: record.error for record in records if record.error is not None}


def _failure(
    text: str,
    *,
    code: int,
    known_to_all: bool,
    errors: Mapping[int, str] | None = None,
    missing: Sequence[int] = (),
) -> dict[str, Any]:
    """An outcome that is an error."""
    return {
        "error": text,
        "code": code,
        "known_to_all": known_to_all,
        "errors": list((errors or {}).items()),  # JSON's objects have no keys that are numbers
        "missing": list(missing),
    }


class Agreement:
    """One rank's side of the agreement."""

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        timeout: float,
        liveness: Liveness | None = None,
        endpoint: str = "",
        local_ranks: LocalRanks | None = None,
    ) -> None:
        """`store` is one of torch's; `endpoint` is the address of the rendezvous.

        Without `liveness`, a rank that ends is noticed only at the timeout, and without
        `local_ranks` one of this host that ends before it joins.
        """
        self._at = f" at {endpoint}" if endpoint else ""
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._number = 0
        # Wait on one connection and operate on another: a wait may block its own for minutes.
        self._wait_store = store
        self._store = BoundedStore(store.clone(), seconds=min(timeout, ANSWER_SECONDS))
        self._monitor = Monitor(
            liveness,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            at=self._at,
            local_ranks=local_ranks,
        )

    def exchange(
        self,
        phase: str,
        *,
        payload: Mapping[str, Any] | None = None,
        error: Exception | None = None,
    ) -> list[dict[str, Any]]:
        """Submit this rank's payload or error; return every rank's payload, read-only.

        Raises on every rank if any had an error or did not arrive in time (AgreedError), or has
        ended (AgreedFailure).
        """
        own = Record.of(self._rank, phase, payload, error_text(error))
        with self._on_store(phase):
            outcome = self._conclude(self._begin(phase), own, error)
        raise_failure(outcome, cause=error)
        return unfold(outcome["columns"], self._world_size)

    @contextlib.contextmanager
    def section(
        self, what: str, *, on_failure: Callable[[HeteroError], None] | None = None
    ) -> Iterator[None]:
        """A section that all ranks enter, such as opening groups; it ends when all have finished.

        Prints which ranks are missing while it lasts. If a rank fails, `on_failure` is called with
        the reason, from a thread: the main thread may be blocked in a library that nothing ends.
        """
        if self._world_size == 1:
            yield
            return
        with self._on_store(what):
            phase = self._begin(what, is_section=True)
            monitoring = MonitorThread(self._monitor, phase, on_failure)
            try:
                yield
            except Exception as error:
                self._raise_cause(phase, error)
                raise
            finally:
                monitoring.stop()
            outcome = self._conclude(phase, Record.of(self._rank, what, None, None), None)
        raise_failure(outcome, cause=None)

    def _raise_cause(self, phase: Phase, error: Exception) -> None:
        """Decide a section's outcome by an error in it, or raise the failure that caused it."""
        if isinstance(error, HeteroError):
            text = str(error) if error.known_to_all else f"rank {self._rank}: {error}"
            outcome = failure(text, agreed=phase.rank_0_arrived(), code=error.exit_code)
            raise_failure(phase.decide(outcome), cause=error)
        # Another rank's failure may be the cause. Rank 0 reports it, or the others if it is rank 0.
        deadline = time.monotonic() + _CAUSE_SECONDS
        while (decided := phase.outcome()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if decided is None and phase.absent():
            decided = phase.decide(self._monitor.overdue(phase))
        if decided is None:
            text = f"rank {self._rank} failed: {error_text(error)}"
            phase.decide(failure(text, agreed=phase.rank_0_arrived(), code=1))
            return
        raise_failure(decided, cause=error)

    def _begin(self, what: str, *, is_section: bool = False) -> Phase:
        self._number += 1
        phase = Phase(self._store, self._number, what, self._world_size, is_section=is_section)
        phase.arrive(self._rank)
        return phase

    @contextlib.contextmanager
    def _on_store(self, what: str) -> Iterator[None]:
        try:
            yield
        except StoreUnresponsive as error:
            raise StoreLost(f"at the {what}{self._at}: {error}", known_to_all=False) from error
        except DistNetworkError as error:
            raise StoreLost(
                f"the rendezvous store{self._at} was lost at the {what}: rank 0 or the launcher "
                "that hosts it has ended; see its log",
                known_to_all=False,
            ) from error

    def _conclude(self, phase: Phase, own: Record, error: Exception | None) -> dict[str, Any]:
        """Submit this rank's record; the outcome when all ranks have, or some cannot."""
        submitted = phase.submit(own)
        if submitted > self._world_size:
            raise UserError(
                f"more processes came{self._at} than the {self._world_size} of one job; if another "
                "job uses this port, choose another --master-port, else give each its own RANK"
            )
        if submitted == self._world_size:
            return phase.decide(self._folded(phase))
        timeout = self._timeout if error is None else min(self._timeout, _TIMEOUT_WITH_AN_ERROR)
        deadline = time.monotonic() + timeout - phase.seconds
        limit = timedelta(seconds=timeout + 60.0)
        store_wait = in_thread(lambda: self._wait_store.wait([phase.outcome_key], limit))
        waiting = WaitReporter()
        has_grace = False
        while not futures.wait(
            [store_wait], min(Monitor.poll_seconds, deadline - time.monotonic())
        ).done:
            waiting.report(lambda: self._monitor.awaited(phase))
            if found := self._monitor.find_failure(phase):
                return phase.decide(found)
            if error is None and (reason := self._monitor.unreachable(phase)):
                error = UserError(reason)
                deadline = min(deadline, time.monotonic() + _TIMEOUT_WITH_AN_ERROR)
            if time.monotonic() < deadline:
                continue
            if self._rank > 0 and error is None and not has_grace and phase.rank_0_arrived():
                has_grace, deadline = True, deadline + _GRACE_SECONDS
                continue
            return phase.decide(self._timed_out(phase, self._monitor.unreachable(phase)))
        store_wait.result()
        return phase.read_outcome()

    def _folded(self, phase: Phase) -> dict[str, Any]:
        """The outcome once all ranks have submitted."""
        records = phase.records()
        if other := [record for record in records if record.phase != records[0].phase]:
            text = (
                f"rank {other[0].rank} compares its {other[0].phase} while rank "
                f"{records[0].rank} compares its {records[0].phase}; start every rank with the "
                "same flags"
            )
            return failure(text, agreed=True)
        ranks = [record.rank for record in records]
        if ranks != list(range(self._world_size)):
            twice = next(rank for rank in ranks if ranks.count(rank) > 1)
            return failure(
                f"two processes say that they are rank {twice}{self._at}; give each its own RANK, "
                "and each job its own --master-port",
                agreed=True,
            )
        if errors := errors_by_text(records):
            return failure(self._combined(errors), agreed=True)
        return {"columns": fold(records)}

    def _timed_out(self, phase: Phase, unreachable: str | None) -> dict[str, Any]:
        """The outcome at the timeout: errors that were submitted, or else the absent ranks.

        `unreachable` is why this rank has no connection to rank 0, which may therefore have ended.
        """
        if phase.is_section:
            return self._monitor.overdue(phase)
        errors = errors_by_text(phase.records())
        if unreachable:
            errors[unreachable] = [self._rank]
        if errors:
            agreed = phase.rank_0_arrived() and not unreachable
            return failure(self._combined(errors), agreed=agreed)
        absent = phase.absent()
        late = absent or phase.unfinished() or range(self._world_size)
        what = "did not come" if absent else "did not answer"
        text = (
            f"{name_ranks(late, self._world_size)} {what} within {self._timeout:g} s while "
            f"the ranks compared their {phase.what}; see whether it was started, can reach rank "
            "0's host, and what its own log says"
        )
        return failure(text, agreed=0 not in late)

    def _combined(self, errors: Mapping[str, list[int]]) -> str:
        if [len(ranks) for ranks in errors.values()] == [self._world_size]:
            return next(iter(errors))
        return "; ".join(f"rank {ranks[0]}: {text}" for text, ranks in errors.items())


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


@dataclass(frozen=True)
class Record:
    """What one rank submits."""

    rank: int
    phase: str
    fields: dict[str, str]
    """By name; values as JSON, so that equal ones are decoded once."""
    error: str | None

    @classmethod
    def of(
        cls, rank: int, phase: str, payload: Mapping[str, Any] | None, error: str | None
    ) -> Record:
        fields = {name: json.dumps(value) for name, value in (payload or {}).items()}
        return cls(rank, phase, fields, error)

    def line(self) -> str:
        return json.dumps([self.rank, self.phase, self.fields, self.error]) + "\n"


def read_lines(data: bytes) -> list[Record]:
    """The records of appended lines, in the order of ranks."""
    return sorted((Record(*json.loads(line)) for line in data.splitlines()), key=lambda r: r.rank)


def fold(records: Sequence[Any]) -> dict[str, Any]:
    """By field: the distinct values, and which of them each record has (None: all the first)."""
    names = dict.fromkeys(name for record in records for name in record.fields)
    return {name: _column([record.fields.get(name) for record in records]) for name in names}


def _column(values: Sequence[str | None]) -> list[Any]:
    index = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return [list(index), [index[value] for value in values] if len(index) > 1 else None]


def unfold(columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The payloads of `count` records. Never modify a value: equal ones are the same object."""
    payloads: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, (values, indices) in columns.items():
        decoded = [None if value is None else json.loads(value) for value in values]
        for payload, index in zip(payloads, indices or [0] * count, strict=True):
            if values[index] is not None:
                payload[name] = decoded[index]
    return payloads


def pack(value: Mapping[str, Any]) -> str:
    """Compressed, because TCPStore limits a value that is set to 8 MiB; as text for any store."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode(), 1)).decode()


def unpack(data: bytes) -> dict[str, Any]:
    return dict(json.loads(zlib.decompress(base64.b64decode(data))))


def errors_by_text(records: Iterable[Record]) -> dict[str, list[int]]:
    """The ranks of each distinct error."""
    errors: dict[str, list[int]] = {}
    for record in records:
        if record.error:
            errors.setdefault(record.error, []).append(record.rank)
    return errors


_HEARTBEAT_TIMEOUT_SECONDS = 15.0
"""After which a rank that is waited for, or its host, hangs."""
_CONNECT_SECONDS = 60.0
"""After which a rank that has opened the store should have connected to rank 0.

One that could not says so by the end of the second phase, so it applies only until then.
"""


class Monitor:
    """One rank's view of the others."""

    poll_seconds: ClassVar = 1.0

    def __init__(
        self,
        liveness: Liveness | None,
        *,
        rank: int,
        world_size: int,
        timeout: float,
        at: str,
        local_ranks: LocalRanks | None = None,
    ) -> None:
        """`at` is the address of the rendezvous, as ` at host:port`, or empty."""
        self.rank, self.world_size, self.timeout, self.at = rank, world_size, timeout, at
        self._liveness, self._local_ranks = liveness, local_ranks

    def unreachable(self, phase: Phase) -> str | None:
        """In the first phase: why this rank cannot reach rank 0. In the second it reports it."""
        return None if self._liveness is None or phase.number > 1 else self._liveness.unreachable

    def find_failure(self, phase: Phase) -> dict[str, Any] | None:
        """The outcome of the phase if a rank has failed or hangs."""
        if self._liveness is None:
            return None
        verb = "opened the" if phase.is_section else "compared their"
        doing = f"while the ranks {verb} {phase.what}"
        failed = self._liveness.failure
        if failed is not None and (self.rank == 0 or failed.rank == 0):
            text = failed.sentence(self._liveness.name([failed.rank]), during=f" {doing}")
            return failure(text, agreed=failed.rank > 0, code=1)
        if silent := self._silent(self._liveness, phase):
            who = self._liveness.name(silent)
            text = (
                f"{who} hangs, or its host does, {doing}: nothing was heard of it for "
                f"{min(silent.values()):.0f} s; see its log"
            )
            return failure(text, agreed=0 not in silent, code=1)
        if self._local_ranks is not None and phase.number == 1:
            ended = self._local_ranks.ended(phase.absent())
            if ended:
                return failure(ended_early(ended), agreed=0 not in ended, code=1)
        lost = self._liveness.never_connected(_CONNECT_SECONDS) if phase.number < 3 else set()
        if lost and (lost := lost & set(phase.absent())):
            text = (
                f"{self._liveness.name(lost)} ended {doing}, or cannot reach rank 0, to which it "
                "has not connected; see its log"
            )
            return failure(text, agreed=True, code=1)
        return None

    def _silent(self, liveness: Liveness, phase: Phase) -> dict[int, float]:
        """The ranks that are waited for and send no heartbeat, and for how many seconds."""
        silent = liveness.silent(_HEARTBEAT_TIMEOUT_SECONDS)
        if silent and self.rank == 0:
            awaited = set(phase.unfinished())
            return {rank: age for rank, age in silent.items() if rank in awaited}
        return silent

    def awaited(self, phase: Phase) -> str | None:
        """Which ranks have not arrived, or else not finished, if this rank is to print it."""
        if self.rank > 0 and phase.rank_0_arrived():
            return None
        absent = phase.absent()
        late = absent or phase.unfinished()
        if not late or self.rank != min(set(range(self.world_size)) - set(absent)):
            return None
        who = name_ranks(late, self.world_size)
        if phase.is_section:
            who += f" to {'come to' if absent else 'finish'} the {phase.what}"
        return f"{who}{self.at}"

    def overdue(self, phase: Phase) -> dict[str, Any]:
        """The outcome of a section that not all ranks have come to, or finished, in time."""
        absent = phase.absent()
        who = name_ranks(absent or phase.unfinished(), self.world_size)
        return failure(
            f"{who} did not {'come to' if absent else 'finish'} the {phase.what}{self.at} within "
            f"{phase.seconds:.0f} s; see its log, and whether it hangs",
            agreed=0 not in absent,
        )


class MonitorThread:
    """Monitors a section from a thread, while the main thread is inside it."""

    def __init__(
        self,
        monitor: Monitor,
        phase: Phase,
        on_failure: Callable[[HeteroError], None] | None,
    ) -> None:
        self._monitor, self._phase, self._on_failure = monitor, phase, on_failure
        self._stopped, self._lock = threading.Event(), threading.Lock()
        threading.Thread(target=self._run, name=phase.what, daemon=True).start()

    def stop(self) -> None:
        """Never call `on_failure` from now on: the main thread goes on with the phase itself."""
        with self._lock:
            self._stopped.set()

    def _run(self) -> None:
        monitor, phase = self._monitor, self._phase
        waiting = WaitReporter()
        try:
            while not self._stopped.wait(Monitor.poll_seconds):
                waiting.report(lambda: monitor.awaited(phase))
                outcome = phase.outcome()
                if outcome is None:
                    found = monitor.find_failure(phase)
                    if found is None and phase.seconds > monitor.timeout:
                        found = monitor.overdue(phase)
                    outcome = found and phase.decide(found)
                if outcome is not None:
                    self._notify(outcome)
                    return
        except DistError:  # the store is gone, which the main thread notices and reports too
            return

    def _notify(self, outcome: Mapping[str, Any]) -> None:
        # Give the main thread time to fail by itself, in which case it finds the same outcome.
        if self._stopped.wait(Monitor.poll_seconds):
            return
        with self._lock:
            if self._stopped.is_set() or self._on_failure is None:
                return
            try:
                raise_failure(outcome, cause=None)
            except HeteroError as error:
                self._on_failure(error)


FIRST_SECONDS, AGAIN_SECONDS = 10.0, 30.0
"""Until a wait's first line, and between the later ones."""
_PAUSE_SECONDS = 0.1


class WaitReporter:
    """The lines of one wait."""

    def __init__(self) -> None:
        self._began, self._due = time.monotonic(), FIRST_SECONDS

    def report(self, whom: str | Callable[[], str | None]) -> None:
        """Print a line if one is due. A `whom` that returns None skips this one."""
        waited = time.monotonic() - self._began
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
        time.sleep(_PAUSE_SECONDS)
