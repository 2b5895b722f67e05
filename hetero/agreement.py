"""How the ranks of a job agree to continue, or to stop, before any process group exists.

In each phase every rank appends its payload, or its error, to one value of the rendezvous store.
The last rank folds all of them into the phase's outcome and thereby wakes the others. An error of
any rank ends all of them, with one sentence, within seconds. So does a rank that ends without
reporting one, which its connection to rank 0 shows (hetero.liveness). The outcome is set once, by
whichever rank is first, and every rank reads the same.

Each rank does the same number of operations on the store per phase, however many ranks there are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError

from hetero.errors import HeteroError, StoreLost, UserError
from hetero.formatting import name_ranks
from hetero.liveness.liveness import Liveness
from hetero.liveness.local_ranks import LocalRanks
from hetero.monitor import Monitor, MonitorThread
from hetero.phase import Phase, error_text, failure, raise_failure
from hetero.records import Record, errors_by_text, fold, unfold
from hetero.store import ANSWER_SECONDS, BoundedStore, StoreUnresponsive, in_thread
from hetero.wait_reporter import WaitReporter

_TIMEOUT_WITH_AN_ERROR = 30.0
"""How long a rank that has an error, and so must end, waits for the others before it reports it."""
_CAUSE_SECONDS = 4.0
"""How long a rank that failed waits to learn whether another rank's failure is the cause."""
_GRACE_SECONDS = 5.0
"""Added to the timeout of other ranks once rank 0, with the same timeout, is there to report."""


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
