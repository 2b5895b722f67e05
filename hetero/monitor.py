"""What a rank sees of the others while it waits for them: who is missing, and who has died.

Who has died or hangs is known from the connections of hetero.liveness. Rank 0 has one to each rank
and settles a phase for all of them; the others do that where it is rank 0 itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed import DistError

from hetero.errors import HeteroError
from hetero.liveness.liveness import Liveness
from hetero.phase import Phase, ended, raise_error
from hetero.waiting import Intervals, Waiting, name_ranks

TICK_SECONDS = 1.0
"""Between two looks."""
_SILENCE_SECONDS = 15.0
"""A rank that is waited for and sends no heartbeat for so long hangs, or its host does."""
_CONNECT_SECONDS = 60.0
"""A rank that has opened the store has reached rank 0 by then, or says in the phase why not.

Only in the first two phases: by the end of the second, each has.
"""


class Monitor:
    """One rank's view of the others."""

    def __init__(
        self,
        liveness: Liveness | None,
        *,
        rank: int,
        world_size: int,
        timeout: float,
        at: str,
        intervals: Intervals,
    ) -> None:
        """`at` says where the ranks meet, as ` at host:port`, or nothing."""
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.at, self.intervals = at, intervals
        self._liveness = liveness

    @property
    def tick(self) -> float:
        """Seconds between two looks."""
        return min(TICK_SECONDS, self.intervals.first)

    def unreachable(self, phase: Phase) -> str | None:
        """Why this rank cannot reach rank 0. Only before a later phase in which it says so."""
        return None if self._liveness is None or phase.number > 1 else self._liveness.unreachable

    def find_failure(self, phase: Phase, *, together: bool = False) -> dict[str, Any] | None:
        """How the phase ends if a rank has died or hangs."""
        if self._liveness is None:
            return None
        doing = f"while the ranks {'opened the' if together else 'compared their'} {phase.what}"
        end = self._liveness.ended
        if end is not None and (self.rank == 0 or end.rank == 0):
            text = end.sentence(self._liveness.name([end.rank]), during=f" {doing}")
            return ended(text, agreed=end.rank > 0, code=1)
        if silent := self._silent(self._liveness, phase, together=together):
            who = self._liveness.name(silent)
            text = (
                f"{who} hangs, or its host does, {doing}: nothing was heard of it for "
                f"{min(silent.values()):.0f} s; see its log"
            )
            return ended(text, agreed=0 not in silent, code=1)
        lost = self._liveness.never_connected(_CONNECT_SECONDS) if phase.number < 3 else set()
        if lost and (lost := lost & set(phase.absent())):
            text = (
                f"{self._liveness.name(lost)} ended {doing}, or cannot reach rank 0, to which it "
                "has not connected; see its log"
            )
            return ended(text, agreed=True, code=1)
        return None

    def _silent(self, liveness: Liveness, phase: Phase, *, together: bool) -> dict[int, float]:
        """The ranks that are waited for and send no heartbeat, and for how many seconds."""
        silent = liveness.silent(_SILENCE_SECONDS)
        if silent and self.rank == 0:
            awaited = set(phase.busy() if together else phase.absent())
            return {rank: age for rank, age in silent.items() if rank in awaited}
        return silent

    def whom(self, phase: Phase, *, together: bool = False) -> str | None:
        """Whom the ranks wait for, if this rank is the one to say it.

        In what is opened `together` also those who have come and are still at it.
        """
        if self.rank > 0 and phase.rank_0_came():
            return None
        absent = phase.absent()
        late = absent or (phase.busy() if together else [])
        if not late or self.rank != min(set(range(self.world_size)) - set(absent)):
            return None
        if together:
            return self.late(phase, "to come to", "to finish", absent=absent)
        return f"{name_ranks(absent, self.world_size)}{self.at}"

    def late(self, phase: Phase, coming: str, finishing: str, *, absent: list[int]) -> str:
        """Who keeps what is opened together from its end, with either verb."""
        who = name_ranks(absent or phase.busy(), self.world_size)
        return f"{who} {coming if absent else finishing} the {phase.what}{self.at}"


class MonitorThread:
    """Looks, from a thread, at what becomes of the others while ranks do something together."""

    def __init__(
        self, monitor: Monitor, phase: Phase, lost: Callable[[HeteroError], None] | None
    ) -> None:
        self._monitor, self._phase, self._lost = monitor, phase, lost
        self._over, self._own = threading.Event(), threading.Lock()
        self._main_is_inside = True
        threading.Thread(target=self._run, name=phase.what, daemon=True).start()

    def leave_the_end_to_others(self) -> None:
        """The main thread hears the outcome by itself from now on."""
        with self._own:
            self._main_is_inside = False

    def stop(self) -> None:
        self.leave_the_end_to_others()
        self._over.set()

    def _run(self) -> None:
        monitor, phase = self._monitor, self._phase
        waiting = Waiting(monitor.intervals)
        try:
            while not self._over.wait(monitor.tick):
                waiting.tell(lambda: monitor.whom(phase, together=True))
                outcome = phase.settled()
                if outcome is None and (end := self._end()) is not None:
                    outcome = phase.settle(end)
                if outcome is not None:
                    self._tell(outcome)
                    return
        except DistError:  # the store is gone; the main thread meets the same and reports it
            return

    def _end(self) -> dict[str, Any] | None:
        """How the phase ends if a rank has died, or the time is over."""
        monitor, phase = self._monitor, self._phase
        end = monitor.find_failure(phase, together=True)
        if end is None and phase.seconds > monitor.timeout:
            absent = phase.absent()
            late = monitor.late(phase, "did not come to", "did not finish", absent=absent)
            text = f"{late} within {monitor.timeout:g} s; see its log, and whether it hangs"
            end = ended(text, agreed=0 not in absent)
        return end

    def _tell(self, outcome: Mapping[str, Any]) -> None:
        # The main thread has first word: if it fails by itself now, it finds the same outcome.
        if self._over.wait(self._monitor.tick):
            return
        with self._own:
            if not self._main_is_inside or self._lost is None:
                return
            try:
                raise_error(outcome, cause=None)
            except HeteroError as error:
                self._lost(error)
