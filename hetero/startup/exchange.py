"""Exchanges of values over a store: with a deadline, and with an error that names who failed."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError

from hetero.errors import ExchangeError, HeteroError, UserError
from hetero.startup.liveness import Liveness
from hetero.startup.store import ANSWER_SECONDS, BoundedStore, WaitReporter
from hetero.text import counted, name_ranks, spans

_MOST_ERRORS = 3
"""The number of different errors that one error repeats."""
_TIMEOUT_WITH_AN_ERROR = 30.0
"""How long a rank that has an error, and so must end, waits for the others before it reports it."""
_CAUSE_SECONDS = 4.0
"""How long a rank that failed waits to learn whether another rank's failure is the cause."""
_LOOK_SECONDS = 1.0
"""Between two looks for a failure while a section lasts."""
_PAUSE_SECONDS = 0.1


class Exchange:
    """One exchange of values between the members of a job, a group or a pair, over a store.

    Each member submits a JSON mapping, or an error. The last to submit folds all of them into the
    outcome, which is set once and which all read: every member's value, or one error. A member that
    has waited for too long, or whose `check` raises, sets the outcome to its error instead, so all
    members that come raise the same.

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
            what: what is exchanged, as errors name it: a plural such as "addresses".
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
        """`submit`, then `wait`."""
        self.submit(value, error=error)
        return self.wait(timeout, check=check)

    def arrive(self) -> None:
        """Optional: announce this member, which submits later.

        `absent` does not list it from then on, and an error says that it "did not answer", rather
        than that it did not come.
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

        Never modify the returned values: equal ones are the same object.

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
        return _unfold(outcome["columns"], self._size)

    def failure(self) -> ExchangeError | None:
        """The error with which the exchange has ended; None if it has not, or not with an error."""
        with self._storing():
            if self._outcome is None and self._store.check([self._outcome_key]):
                self._outcome = _unpack(self._store.get(self._outcome_key))
            return None if self._outcome is None else self._failure_in(self._outcome)

    def has_begun(self) -> bool:
        """Returns whether any member has submitted. One small store operation, to poll with."""
        with self._storing():
            return bool(self._store.check([self._count_key]))

    def submitted(self) -> dict[int, dict[str, Any]]:
        """What members have submitted so far, in that order; {} for a member with an error."""
        with self._storing():
            records = self._records()
        values = _unfold(_fold(records), len(records))
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
            return _unpack(self._store.get(self._outcome_key))
        except DistStoreError:
            return self._decide(self._timed_out(timeout))
        except HeteroError as error:
            # A member may have submitted its value and then ended, before it could set the outcome.
            return self._decide(self._failed(error))

    def _decide(self, outcome: Mapping[str, Any]) -> dict[str, Any]:
        """Set the outcome unless another member has; return the one that is set."""
        return _unpack(self._store.compare_set(self._outcome_key, "", _pack(outcome)))

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
        return {"columns": _fold(sorted(records, key=lambda record: record.member))}

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
            f"{self._name_members(absent or missing)} did not {verb} within {timeout:g} s while "
            f"{self.what} were exchanged{self._at}; {self._remedy}"
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
        return cls(member, what, fields, _error_text(error), code)

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


def _fold(records: Sequence[_Record]) -> dict[str, Any]:
    """By field: the distinct values, and which of them each record has (None: all the first)."""
    names = dict.fromkeys(name for record in records for name in record.fields)
    return {name: _column([record.fields.get(name) for record in records]) for name in names}


def _column(values: Sequence[str | None]) -> list[Any]:
    index = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return [list(index), [index[value] for value in values] if len(index) > 1 else None]


def _unfold(columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The payloads of `count` records. Never modify a value: equal ones are the same object."""
    payloads: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, (values, indices) in columns.items():
        decoded = [None if value is None else json.loads(value) for value in values]
        for payload, index in zip(payloads, indices or [0] * count, strict=True):
            if values[index] is not None:
                payload[name] = decoded[index]
    return payloads


def _pack(value: Mapping[str, Any]) -> str:
    """Compressed, because TCPStore limits a value that is set to 8 MiB; as text for any store."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode(), 1)).decode()


def _unpack(data: bytes) -> dict[str, Any]:
    return dict(json.loads(zlib.decompress(base64.b64decode(data))))


def _error_text(error: Exception | None) -> str | None:
    """An error's message, or else its type; None without an error."""
    return None if error is None else str(error) or type(error).__name__


class JobExchanges:
    """The exchanges between a job's ranks, one after another, and what they open together.

    All ranks make the same ones in the same order. A rank that ends or hangs, as
    `hetero.startup.liveness` sees it, ends them within seconds, and who is waited for is printed.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        timeout: float,
        liveness: Liveness | None = None,
        endpoint: str = "",
    ) -> None:
        """`store` is one of torch's; `endpoint` is the address of the rendezvous.

        Without `liveness`, a rank that ends is noticed only at the timeout.
        """
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self._endpoint, self._liveness = endpoint, liveness
        self._number = 0
        """The number of the last exchange, by which its keys in the store differ from others'."""
        answer = min(timeout, ANSWER_SECONDS)
        self._store = BoundedStore(store.clone(), seconds=answer, waits_on=store)

    def exchange(
        self,
        what: str,
        *,
        payload: Mapping[str, Any] | None = None,
        error: Exception | None = None,
        joining: bool = False,
    ) -> list[dict[str, Any]]:
        """Submit this rank's payload or error; return every rank's payload, read-only.

        Args:
            what: what is exchanged, as errors name it.
            payload: JSON values by name.
            error: why this rank has no payload.
            joining: True until a rank that cannot connect to rank 0 has submitted that as its
                error: ranks may still be on their way, and need not be connected yet.

        Raises ExchangeError: on every rank if any had an error, did not come in time or has ended.
        """
        exchange = self._arrive(what)
        waiting = WaitReporter()

        def check() -> None:
            waiting.report(lambda: self._awaited(exchange, what))
            if self._liveness is None:
                return
            during = f"while the ranks compared their {what}"
            self._liveness.require_alive(exchange, during, joining=joining)
            unreachable = self._liveness.unreachable if joining and error is None else None
            if unreachable is not None and waiting.seconds > _TIMEOUT_WITH_AN_ERROR:
                raise UserError(unreachable)

        timeout = self._timeout if error is None else min(self._timeout, _TIMEOUT_WITH_AN_ERROR)
        return exchange.run(payload, error=error, timeout=timeout, check=check)

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
        exchange, waiting = self._arrive(what), WaitReporter()
        left, lock = threading.Event(), threading.Lock()

        def check() -> None:
            waiting.report(lambda: self._awaited(exchange, what, is_section=True))
            if self._liveness is not None:
                during = f"while the ranks opened the {what}"
                self._liveness.require_alive(exchange, during, joining=False)
            if waiting.seconds > self._timeout:
                raise self._overdue(exchange, what, waiting.seconds)

        def watch() -> None:
            failure: ExchangeError | None = None
            try:
                while failure is None:
                    if left.wait(_LOOK_SECONDS):
                        return
                    failure = exchange.failure()
                    if failure is None:
                        check()
            except HeteroError as error:
                with contextlib.suppress(ExchangeError):
                    failure = exchange.abort(error)
            # Give the main thread time to fail by itself, in which case it raises the same. It
            # notices by itself, too, that the store is lost.
            if failure is None or on_failure is None or left.wait(_LOOK_SECONDS):
                return
            with lock:
                if not left.is_set():
                    on_failure(failure)

        threading.Thread(target=watch, name=what, daemon=True).start()
        try:
            yield
        except Exception as error:
            if (cause := self._cause(exchange, what, error, waiting)) is not None:
                raise cause from error
            raise
        finally:
            with lock:  # from now on `on_failure` is not called
                left.set()
        exchange.run(timeout=self._timeout + 60.0, check=check)

    def _cause(
        self, exchange: Exchange, what: str, error: Exception, waiting: WaitReporter
    ) -> ExchangeError | None:
        """The failure of another rank that caused an error in a section; None if this rank's did.

        Tells the others of this rank's error, unless another failure came first.
        """
        if not isinstance(error, HeteroError):
            # Another rank's failure may be the cause. Rank 0 reports it, or others if it is rank 0.
            deadline = time.monotonic() + _CAUSE_SECONDS
            while (cause := exchange.failure()) is None and time.monotonic() < deadline:
                time.sleep(_PAUSE_SECONDS)
            if cause is None and exchange.absent():
                cause = exchange.abort(self._overdue(exchange, what, waiting.seconds))
            if cause is None:
                exchange.abort(self._of_this_rank(exchange, f" failed: {_error_text(error)}"))
            return cause
        own = self._of_this_rank(exchange, f": {error}")
        own.exit_code = error.exit_code
        cause = exchange.abort(error if error.known_to_all else own)
        is_own = cause is not None and str(cause) == str(own)
        return None if is_own and not own.known_to_all else cause

    def _of_this_rank(self, exchange: Exchange, text: str) -> ExchangeError:
        return ExchangeError(f"rank {self._rank}{text}", known_to_all=0 not in exchange.absent())

    def _arrive(self, what: str) -> Exchange:
        self._number += 1
        exchange = Exchange(
            self._store,
            what,
            member=self._rank,
            size=self._world_size,
            key=f"hetero/exchange {self._number}",
            endpoint=self._endpoint,
            name_members=lambda ranks: name_ranks(ranks, self._world_size),
            remedy=(
                "see whether it was started, can reach rank 0's host, and what its own log says"
            ),
        )
        exchange.arrive()
        return exchange

    def _awaited(self, exchange: Exchange, what: str, *, is_section: bool = False) -> str | None:
        """The ranks that have not come, or else not finished, if this rank is to print them."""
        absent = exchange.absent()
        if self._rank > 0 and 0 not in absent:
            return None
        late = absent or exchange.missing()
        if not late or self._rank != min(set(range(self._world_size)) - set(absent)):
            return None
        who = name_ranks(late, self._world_size)
        if is_section:
            who += f" to {'come to' if absent else 'finish'} the {what}"
        return f"{who} at {self._endpoint}" if self._endpoint else who

    def _overdue(self, exchange: Exchange, what: str, seconds: float) -> ExchangeError:
        """The error that not all ranks have come to a section, or finished it, in time."""
        absent = exchange.absent()
        who = name_ranks(absent or exchange.missing(), self._world_size)
        at = f" at {self._endpoint}" if self._endpoint else ""
        return ExchangeError(
            f"{who} did not {'come to' if absent else 'finish'} the {what}{at} within "
            f"{seconds:.0f} s; see its log, and whether it hangs",
            exit_code=UserError.exit_code,
            known_to_all=0 not in absent,
        )
