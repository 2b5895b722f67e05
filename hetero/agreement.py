"""How the ranks of a job agree to go on, or to stop, before any process group exists.

In each phase every rank appends what it has to say, or its error, to one value of the rendezvous
store. The last to come wakes rank 0, which folds all of it into the phase's outcome and so wakes
the others. An error of any rank ends all of them, with one sentence, within seconds; so does a rank
that dies without a word, which its connection to rank 0 tells (hetero.liveness). The outcome is set
once, by whoever comes first, and every rank reads the same.

However many ranks there are, a phase costs each the same number of operations on the store.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.distributed import DistNetworkError

from hetero.errors import AgreedError, HeteroError, StoreLost, UserError
from hetero.liveness.liveness import Liveness
from hetero.monitor import Monitor, MonitorThread
from hetero.phase import Phase, ended, raise_error, sentence
from hetero.records import Record, errors_by_text, fold, unfold
from hetero.store import BoundedStore, Store, StoreSilent, StoreWait
from hetero.waiting import Intervals, Waiting, name_ranks

_PATIENCE_WITH_AN_ERROR = 30.0
"""A rank that has to end anyway waits no longer for the others before it says why."""
_PATIENCE_WITH_A_FAILURE = 4.0
"""What a rank that failed gives the others to tell it whether one of them has died."""
_GRACE_SECONDS = 5.0
"""What a rank gives rank 0, which is there and has the same deadline, to speak first."""
_ANNOUNCE_SECONDS = 3.0
"""How long a rank that ends tries to tell the others why."""
_LEFT = "hetero/left/others"


class Agreement:
    """One rank's side of the agreement."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        timeout: float,
        liveness: Liveness | None = None,
        endpoint: str = "",
        intervals: Intervals | None = None,
    ) -> None:
        """`endpoint` is where the ranks meet; `intervals` are those of a wait's lines.

        Without `liveness` a rank that dies is only missed when the time is over.
        """
        self._at = f" at {endpoint}" if endpoint else ""
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._number = 0
        if world_size == 1:
            return
        # A connection of its own: the other may be held by a wait of minutes.
        self._waits: Store = store
        self._store = BoundedStore(store.clone(), seconds=timeout)  # type: ignore[attr-defined]
        self._monitor = Monitor(
            liveness,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            at=self._at,
            intervals=intervals or Intervals(),
        )

    def exchange(
        self,
        phase: str,
        *,
        payload: Mapping[str, Any] | None = None,
        error: Exception | None = None,
    ) -> list[dict[str, Any]]:
        """Tell the others this rank's payload or error; return every rank's payload, to be read.

        Raises on every rank when any of them had an error or did not come in time (AgreedError), or
        has ended (AgreedFailure).
        """
        mine = Record.of(self._rank, phase, payload, sentence(error))
        if self._world_size == 1:
            if mine.error is not None:
                raise AgreedError(mine.error) from error
            return unfold(fold([mine]), 1)
        with self._on_store(phase):
            here = self._next(phase)
            here.come(self._rank)
            here.tell(mine)
            outcome = self._await_all(here, error)
        raise_error(outcome, cause=error)
        return unfold(outcome["columns"], self._world_size)

    def announce_failure(self, error: Exception) -> None:
        """Tell the others that this rank ends for a reason that no phase foresaw.

        Waits for a few seconds at most: the process that hosts the store may answer no more, and
        then this rank has to end without having been heard.
        """
        if self._world_size == 1:
            return
        telling = threading.Thread(target=self._announce, args=(error,), daemon=True)
        telling.start()
        telling.join(_ANNOUNCE_SECONDS)

    def _announce(self, error: Exception) -> None:
        text = f"rank {self._rank} failed: {sentence(error)}"
        # They are in this rank's phase, or wait for it in the next.
        for number in (self._number, self._number + 1):
            with contextlib.suppress(Exception):  # the store is gone, and those who would read it
                phase = Phase(self._store, number, "", self._world_size)
                phase.settle(ended(text, agreed=self._rank > 0, code=1))
        if self._rank > 0:
            # Nor does rank 0 have to stay for this one's sake.
            with contextlib.suppress(Exception):
                self._store.add(_LEFT, 1)

    @contextlib.contextmanager
    def together(
        self, what: str, *, lost: Callable[[HeteroError], None] | None = None
    ) -> Iterator[None]:
        """Around what the ranks do together without this agreement, such as opening groups.

        Ends when all ranks have finished. Whoever is missing is named while it lasts. If a rank
        ends on the way, or another fails, `lost` is called with the reason, from a thread: what
        the ranks do may be a wait in a library that nothing else can end.
        """
        if self._world_size == 1:
            yield
            return
        with self._on_store(what):
            here = self._next(what)
            here.come(self._rank)
            watch = MonitorThread(self._monitor, here, lost)
            try:
                try:
                    yield
                except Exception as error:
                    self._explain(here, error)
                    raise
                watch.leave_the_end_to_others()
                here.finish(self._rank)
                awaited = StoreWait(self._waits, here.outcome, self._timeout + 60.0)
                while not awaited.over.wait(1.0):
                    pass
                awaited.require()
                outcome = here.read_outcome()
            finally:
                watch.stop()
            raise_error(outcome, cause=None)

    def _explain(self, phase: Phase, error: Exception) -> None:
        """Raise what is behind a failure in what the ranks do together, and tell the others."""
        if isinstance(error, HeteroError):
            text = str(error) if error.known_to_all else f"rank {self._rank}: {error}"
            end = ended(text, agreed=phase.rank_0_came(), code=error.exit_code)
            raise_error(phase.settle(end), cause=error)
        # It may be because another has died. Rank 0 says who, or the others say it of rank 0.
        deadline = time.monotonic() + _PATIENCE_WITH_A_FAILURE
        while (outcome := phase.settled()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if outcome is None and (absent := phase.absent()):
            text = (
                f"{name_ranks(absent, self._world_size)} did not come to the {phase.what}"
                f"{self._at} in time; see its log, and whether it hangs"
            )
            outcome = phase.settle(ended(text, agreed=0 not in absent))
        if outcome is None:
            text = f"rank {self._rank} failed: {sentence(error)}"
            phase.settle(ended(text, agreed=phase.rank_0_came(), code=1))
            return
        raise_error(outcome, cause=error)

    def leave(self, seconds: float = 10.0) -> None:
        """End together after an error that all ranks know of. Rank 0 has printed it by now.

        The others stay until it has, so that a launcher cannot end it first; and rank 0, which may
        be the store's host, stays until they have read what they came for. Nobody stays longer
        than `seconds`, whatever has become of the rest.
        """
        if self._world_size == 1:
            return
        first = "hetero/left/0"
        deadline, pause = time.monotonic() + seconds, 0.01
        try:
            if self._rank == 0:
                self._store.set(first, "1")
            # Not the store's own wait, which logs that its time is over.
            while time.monotonic() < deadline and not (
                self._store.add(_LEFT, 0) >= self._world_size - 1
                if self._rank == 0
                else self._store.check([first])
            ):
                time.sleep(pause)
                pause = min(2 * pause, 0.3)
            if self._rank > 0:
                self._store.add(_LEFT, 1)
        except Exception:  # the others are gone, and with them the reason to wait
            return

    def _next(self, what: str) -> Phase:
        self._number += 1
        return Phase(self._store, self._number, what, self._world_size)

    @contextlib.contextmanager
    def _on_store(self, what: str) -> Iterator[None]:
        try:
            yield
        except StoreSilent as failure:
            raise StoreLost(f"at the {what}{self._at}: {failure}", known_to_all=False) from failure
        except DistNetworkError as failure:
            raise StoreLost(
                f"the rendezvous store{self._at} was lost at the {what}: rank 0 or the launcher "
                "that hosts it has ended; see its log",
                known_to_all=False,
            ) from failure

    def _await_all(self, phase: Phase, error: Exception | None) -> dict[str, Any]:
        """The outcome of a phase, once all have come or it is known that they will not."""
        patience = self._timeout if error is None else min(self._timeout, _PATIENCE_WITH_AN_ERROR)
        deadline = time.monotonic() + patience
        key = phase.all if self._rank == 0 else phase.outcome
        awaited = StoreWait(self._waits, key, patience + 60.0)
        waiting = Waiting(self._monitor.intervals)
        tick = self._monitor.tick
        late = False
        while not awaited.over.wait(max(0.0, min(tick, deadline - time.monotonic()))):
            waiting.tell(lambda: self._monitor.whom(phase))
            if end := self._monitor.find_failure(phase):
                return phase.settle(end)
            if error is None and (reason := self._monitor.unreachable(phase)):
                error = UserError(reason)
                deadline = min(deadline, time.monotonic() + _PATIENCE_WITH_AN_ERROR)
            if time.monotonic() < deadline:
                continue
            if self._rank > 0 and error is None and not late and phase.rank_0_came():
                late, deadline = True, deadline + _GRACE_SECONDS
                continue
            return phase.settle(self._too_late(phase, self._monitor.unreachable(phase)))
        awaited.require()
        if self._rank > 0:
            return phase.read_outcome()
        return phase.settled() or phase.settle(self._fold(phase.what, phase.records()))

    def _fold(self, what: str, records: list[Record]) -> dict[str, Any]:
        """The outcome when all have told."""
        odd = [record for record in records if record.phase != what]
        if odd:
            text = (
                f"rank {odd[0].rank} compares its {odd[0].phase} while rank 0 compares its {what}; "
                "start every rank with the same flags"
            )
            return ended(text, agreed=True)
        ranks = [record.rank for record in records]
        if ranks != list(range(self._world_size)):
            twice = next(rank for rank in ranks if ranks.count(rank) > 1)
            return ended(
                f"two processes say that they are rank {twice}; give each its own RANK", agreed=True
            )
        if errors := errors_by_text(records):
            return ended(self._combine(errors), agreed=True)
        return {"columns": fold(records)}

    def _too_late(self, phase: Phase, unreachable: str | None) -> dict[str, Any]:
        """The outcome when the time is over. What was heard says more than who was not.

        `unreachable` is why this rank has no connection to rank 0, which may therefore have ended.
        """
        errors = errors_by_text(phase.records())
        if unreachable:
            errors[unreachable] = [self._rank]
        if errors:
            agreed = phase.rank_0_came() and not unreachable
            return ended(self._combine(errors), agreed=agreed)
        absent = phase.absent()
        text = (
            f"{name_ranks(absent, self._world_size)} did not come within {self._timeout:g} s while "
            f"the ranks compared their {phase.what}; see whether it was started, can reach rank "
            "0's host, and what its own log says"
        )
        return ended(
            text if absent else "rank 0 did not answer; see its log", agreed=0 not in absent
        )

    def _combine(self, errors: Mapping[str, list[int]]) -> str:
        if len(errors) == 1:
            (text, ranks), *_ = errors.items()
            return text if len(ranks) == self._world_size else f"rank {ranks[0]}: {text}"
        return "; ".join(f"rank {ranks[0]}: {text}" for text, ranks in errors.items())
