"""What a rank sees of the others while it waits for them: who is missing, and who has died."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed import DistError

from hetero import pulses
from hetero.errors import HeteroError
from hetero.phase import MeetingStore, Phase, ended, raise_error
from hetero.pulses import Pulses, named
from hetero.waiting import Intervals, Waiting, name_ranks

SILENCE_SECONDS = 15.0
"""A rank that was heard and then is not for so long has ended, or its host is stuck."""
_SUSPICION_SECONDS = 4.0
"""The same once another rank has failed in what they do together: it may be why."""
_LOOK_SECONDS = 5.0
"""How often each of the others looks whether rank 0 lives, while it waits for it."""


class Lookout:
    """One rank's view of the others."""

    def __init__(
        self,
        store: MeetingStore,
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
        self._store, self._pulses = store, Pulses(store)
        self._looked = 0.0

    @property
    def tick(self) -> float:
        """Seconds between two looks."""
        return min(pulses.PULSE_SECONDS, self.intervals.first)

    def find_the_dead(
        self, phase: Phase, *, seconds: float, together: bool = False
    ) -> dict[str, Any] | None:
        """How the phase ends if a rank has died. Rank 0 looks for all, the others for rank 0."""
        hosts: dict[int, str] = {}
        now = time.monotonic()
        if self.rank > 0 and not together and now < self._looked + _LOOK_SECONDS:
            return None
        self._looked = now
        if self.rank == 0:
            hosts = self._pulses.hosts()
            missing = set(phase.busy() if together else phase.absent())
            suspects = sorted(missing & hosts.keys() - {0})
        else:
            suspects = [0] if self._store.check([pulses.key(0)]) else []
        silent = self._pulses.silent(suspects, seconds=seconds)
        if not silent:
            return None
        doing = f"opened the {phase.what}" if together else f"compared their {phase.what}"
        who = named(silent, hosts or self._pulses.hosts())
        text = (
            f"{who} ended, or its host hangs, while the ranks {doing}: nothing was heard of it for "
            f"{seconds:g} s; see its log"
        )
        return ended(text, agreed=0 not in silent, code=1)

    def whom(self, phase: Phase) -> str | None:
        """Whom the ranks wait for, if this rank is the one to say it."""
        if self.rank > 0 and phase.rank_0_came():
            return None
        absent = phase.absent()
        here = set(range(self.world_size)) - set(absent)
        if not absent or self.rank != min(here):
            return None
        return f"{name_ranks(absent, self.world_size)}{self.at}"

    def whom_to_open(self, phase: Phase) -> str | None:
        """The same of what is opened together: those who never came, or else are still at it."""
        if self.rank > 0 and phase.rank_0_came():
            return None
        absent = phase.absent()
        late = absent or phase.busy()
        if not late or self.rank != min(set(range(self.world_size)) - set(absent)):
            return None
        verb = "come to" if absent else "finish"
        return f"{name_ranks(late, self.world_size)} to {verb} the {phase.what}{self.at}"


class Watch:
    """Looks, from a thread, at what becomes of the others while ranks do something together."""

    def __init__(
        self, lookout: Lookout, phase: Phase, lost: Callable[[HeteroError], None] | None
    ) -> None:
        self._lookout, self._phase, self._lost = lookout, phase, lost
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
        lookout, phase = self._lookout, self._phase
        waiting = Waiting(lookout.intervals)
        deadline = time.monotonic() + lookout.timeout
        try:
            while not self._over.wait(lookout.tick):
                waiting.tell(lambda: lookout.whom_to_open(phase))
                outcome = phase.settled()
                if outcome is None:
                    outcome = self._end(late=time.monotonic() > deadline)
                if outcome is not None:
                    self._tell(outcome)
                    return
        except DistError:  # the store is gone; the main thread meets the same and reports it
            return

    def _end(self, *, late: bool) -> dict[str, Any] | None:
        """The outcome, if a rank has died or the time is over."""
        lookout, phase = self._lookout, self._phase
        seconds = _SUSPICION_SECONDS if phase.alarmed() else SILENCE_SECONDS
        end = lookout.find_the_dead(phase, seconds=seconds, together=True)
        if end is None and late:
            absent = phase.absent()
            who = name_ranks(absent or phase.busy(), lookout.world_size)
            verb = "come to" if absent else "finish"
            text = (
                f"{who} did not {verb} the {phase.what}{lookout.at} within {lookout.timeout:g} s; "
                "see its log, and whether it hangs"
            )
            end = ended(text, agreed=0 not in absent)
        return None if end is None else phase.settle(end)

    def _tell(self, outcome: Mapping[str, Any]) -> None:
        # The main thread has first word: if it fails by itself now, it finds the same outcome.
        if self._over.wait(pulses.PULSE_SECONDS):
            return
        with self._own:
            if not self._main_is_inside or self._lost is None:
                return
            try:
                raise_error(outcome, cause=None)
            except HeteroError as error:
                self._lost(error)
