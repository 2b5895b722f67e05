"""What a rank knows of the others while it waits for them: which are missing, failed or hang.

Failures and hangs are known from the connections of hetero.liveness. Rank 0 has one to each rank
and ends a phase for all of them; the others do so if it is rank 0 that failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch.distributed import DistError

from hetero.errors import HeteroError
from hetero.formatting import name_ranks
from hetero.liveness.liveness import Liveness
from hetero.liveness.local_ranks import LocalRanks, ended_early
from hetero.phase import Phase, failure, raise_failure
from hetero.wait_reporter import WaitReporter

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
