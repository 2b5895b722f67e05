"""Watches a run on rank 0: tells who holds it up, while it stands still, and who is slow."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hetero.observe.blame import (
    Finding,
    HostProcess,
    Surroundings,
    blame,
    host_process,
)
from hetero.observe.collect import Collector, Seen
from hetero.observe.flight_recorder import flight_recorder
from hetero.observe.record import CLOCK_SET, THROTTLED, Phase
from hetero.observe.state import SLOW_RATIO
from hetero.startup.liveness import LivenessServer, heartbeat_interval, silent_after

_TICK_SECONDS = 0.5
_STEPS = 10
"""Times the median step, after which a run stands still."""
_SHORTEST_SECONDS = 5.0
_WARM_UP = 3
"""Steps of which the median is taken at least."""
_LATE_INTERVALS = 2.5
"""Between heartbeats, after which a rank's process is looked at."""
_ANSWER_SECONDS = 1.5
"""For a rank to say what it sees of a process on its host."""
_SLOW_SECONDS = 30.0
"""Between two looks for slow ranks at most; longer where there are many. A third of the time of the
warning where that is shorter: two looks in a row have to find a rank slow, after one in whose
midst it became so."""
_SECONDS_A_RANK = 0.05
_LEAST_STEPS = 5
"""Between two looks, for a figure to count."""
_STARVED = 0.25
"""Of a rank's time in its data loader, from which on it is told, if that is twice its peers'."""

_log = logging.getLogger(__name__)


class StallWatch:
    """A thread that reads records, and asks ranks about processes of their hosts.

    As long as rank 0 makes steps it reads rank 0's record alone: a step of one rank waits for all.
    Of a script, whose steps are not known, it reads all.
    """

    def __init__(
        self,
        collector: Collector,
        liveness: LivenessServer,
        *,
        surroundings: Surroundings,
        warn_after: float,
        tell: Callable[[str], None],
    ) -> None:
        """
        Args:
            warn_after: seconds without progress before a warning, or ten median steps where that is
                shorter; of a script, seconds that a call waits for others; 0: no warning.
            tell: prints a line.
        """
        self._collector, self._liveness = collector, liveness
        self._surroundings = surroundings
        self._warn_after, self._tell = warn_after, tell
        self._steps: deque[float] = deque(maxlen=20)
        self._looked: dict[int, HostProcess] = {}
        self._progress: tuple[Any, ...] = ()
        self._moved_at, self._next_warning = time.monotonic(), 0.0
        self._last_iteration, self._told_slow = 0, set[tuple[str, int]]()
        self._samples: dict[int, Seen] = {}
        self._suspected: set[int] = set()
        """Found slow by the last look."""
        count = len(surroundings.names)
        self._between_looks = max(
            min(_SLOW_SECONDS, warn_after / 3 or _SLOW_SECONDS), _SECONDS_A_RANK * count
        )
        self._next_look = time.monotonic() + self._between_looks
        self._told: set[tuple[str, str]] = set()
        """Kinds of incidents, and of which host or rail."""
        self._next_script_look = 0.0
        self._findings: list[Finding] = []
        self._stopped = threading.Event()
        liveness.on_answer(self._on_answer)
        collector.on_incident(self._on_incident)
        threading.Thread(target=self._run, name="stall watch", daemon=True).start()

    def close(self) -> None:
        self._stopped.set()

    def last_words(self) -> str:
        """Who held the run up, if it has stood still until now; else empty."""
        if not self._findings or self._has_moved():
            return ""
        return "; ".join(finding.sentence for finding in self._findings)

    def threshold(self) -> float:
        """Seconds without progress after which a run stands still."""
        if len(self._steps) < _WARM_UP:
            return self._warn_after
        shortest = max(_SHORTEST_SECONDS, _STEPS * statistics.median(self._steps))
        return min(self._warn_after, shortest)

    def _run(self) -> None:
        while not self._stopped.wait(_TICK_SECONDS):
            try:
                self._look()
            except Exception as error:  # what only shows things never ends a run
                _log.warning("the stall watch failed: %s: %s", type(error).__name__, error)

    def _look(self) -> None:
        now, recorder = time.monotonic(), self._collector.recorder
        if recorder.check_clock():  # rank 0's snapshots are rare
            self._collector.add_incidents(recorder.incidents())
        if recorder.phase == Phase.SCRIPT:
            self._look_at_script(now)
            return
        if recorder.iteration != self._last_iteration:
            if recorder.iteration_seconds:
                self._steps.append(recorder.iteration_seconds)
            self._last_iteration = recorder.iteration
        if self._has_moved():
            self._progress, self._moved_at = self._own_progress(), now
            self._next_warning, self._findings = 0.0, []
            if now >= self._next_look:
                self._look_for_slow_ranks()
                self._next_look = time.monotonic() + self._between_looks
            return
        # Before the first step, everything takes as long as it takes: building, loading, compiling.
        is_starting = recorder.iteration == 0 or recorder.phase == Phase.START
        if not self._warn_after or is_starting:
            return
        still = now - self._moved_at
        if still >= max(self.threshold(), self._next_warning):
            self._next_warning = 2 * still
            self._warn(still)

    def _look_at_script(self, now: float) -> None:
        """A script has no steps: it stands still while a call of any rank waits for others."""
        if not self._warn_after or now < self._next_script_look:
            return
        self._next_script_look = now + _SECONDS_A_RANK * len(self._surroundings.names)
        longest = max(
            (
                wait.seconds + one.age
                for one in self._collector.seen().values()
                for wait in one.snapshot.waits
            ),
            default=0.0,
        )
        if longest < self._warn_after:
            self._next_warning, self._findings = 0.0, []
        elif longest >= self._next_warning:
            self._next_warning = 2 * longest
            self._warn(longest)

    def _own_progress(self) -> tuple[Any, ...]:
        recorder = self._collector.recorder
        return recorder.iteration, recorder.micro_batch, recorder.gradients, recorder.phase

    def _has_moved(self) -> bool:
        return self._own_progress() != self._progress

    def _warn(self, still: float) -> None:
        seen = self._collector.seen()
        count = len(self._surroundings.names)
        limit, late = silent_after(count), _LATE_INTERVALS * heartbeat_interval(count)
        # A process that is stopped shows at once, long before its silence means something.
        answers = self._look_at_late(seen, [rank for rank, one in seen.items() if one.age > late])
        self._findings = blame(
            seen,
            replace(self._surroundings, processes=dict(self._looked), answers=answers),
            silent_after=limit,
            expected=self._surroundings.names,
        )
        if not self._findings:
            own = seen[0].snapshot
            where = f" (at {own.frame})" if own.frame else ""
            text = f"rank 0 is in phase '{own.phase}' for {own.seconds:.0f} s{where}"
        else:
            text = "; ".join(finding.sentence for finding in self._findings)
        self._tell(f"warning: no progress for {still:.0f} s: {text}")
        ranks = sorted({rank for finding in self._findings for rank in finding.ranks})
        self._collector.recorder.add_incident(
            "stall",
            text,
            seconds=round(still, 1),
            ranks=ranks,
            causes=[str(finding.cause) for finding in self._findings],
        )

    def _look_at_late(self, seen: Mapping[int, Seen], late: list[int]) -> dict[int, bool]:
        """Ask a rank of the same host what its kernel says of each late rank's process.

        Returns for those whose host has no other rank whether its kernel acknowledges anything.
        """
        self._looked = {}
        asked, alone = [], set[int]()
        for rank in late:
            own = seen[rank].snapshot
            if own.host == seen[0].snapshot.host:
                self._looked[rank] = host_process(own.pid)
                continue
            peers = [
                other
                for other, one in seen.items()
                if one.snapshot.host == own.host and other not in late
            ]
            if peers:
                self._liveness.request({"look": own.pid, "rank": rank}, ranks=peers[:1])
                asked.append(rank)
            else:
                alone.add(rank)
        self._liveness.probe(alone)
        deadline, silent = time.monotonic() + _ANSWER_SECONDS, alone
        while time.monotonic() < deadline:
            silent = self._liveness.unacknowledged(alone)
            if not silent and all(rank in self._looked for rank in asked):
                break
            time.sleep(0.05)
        return {rank: rank not in silent for rank in alone}

    def _on_answer(self, rank: int, answer: Mapping[str, Any]) -> None:
        if "looked" in answer:
            self._looked[int(answer["looked"])] = HostProcess(
                exists=bool(answer["exists"]),
                state=str(answer["state"]),
                tracer=int(answer["tracer"]),
            )

    def _on_incident(self, incident: Mapping[str, Any]) -> None:
        """Tell once of what holds nobody up by itself; several ranks may have seen the same."""
        kind, name = str(incident["kind"]), self._surroundings.name(int(incident["rank"]))
        if kind == CLOCK_SET:
            what = f"{incident['host']} {incident['seconds'] < 0}"
            text = (
                f"the clock of {name} was set {incident['text']}: times in its logs and incidents "
                "are wrong by that, and nothing waits longer for it; see what sets the clock of "
                "its host"
            )
        elif kind.startswith("rail "):
            ends = str(incident["rail"]).split(" to ")
            what = " ".join(sorted(ends))
            if kind == "rail back":
                self._told -= {("rail slow", what), ("rail lost", what)}
                return
            peer = self._surroundings.name(int(incident["peer"]))
            text = f"between {name} and {peer}: {str(incident['text']).partition(': ')[2]}"
        elif kind == THROTTLED:
            what, text = str(incident["rank"]), f"{name}: {incident['text']}; see its cooling"
        else:
            return
        if (kind, what) not in self._told:
            self._told.add((kind, what))
            self._tell(f"warning: {text}")

    def _look_for_slow_ranks(self) -> None:
        """Tell once of a rank that computes slower than its peers, or that its loader starves."""
        seen = self._collector.seen()
        spent = _spent(self._samples, seen)
        if spent and max(one.steps for one in spent.values()) < _LEAST_STEPS:
            return  # the samples are kept until enough steps were made since
        passes = _pass_seconds(spent)
        suspected, self._suspected = self._suspected, set()
        for rank, seconds in passes.items():
            others = [
                passes[peer] for peer in self._surroundings.peers.get(rank, ()) if peer in passes
            ]
            if others and seconds >= SLOW_RATIO * (usual := statistics.median(others)):
                self._suspected.add(rank)
                if rank not in suspected:
                    continue
                self._tell_once(
                    "slow",
                    rank,
                    f"{self._surroundings.name(rank)} computes slower than its peers of the same "
                    f"vendor and stage: {seconds:.3f} s of passes a step, {seconds / usual:.2f} "
                    "times theirs",
                )
        for rank, share in _starved(spent).items():
            name = self._surroundings.name(rank)
            self._tell_once("data", rank, f"{name} spends {share:.0%} of its time on its loader")
        self._samples = seen

    def _tell_once(self, kind: str, rank: int, text: str) -> None:
        if (kind, rank) not in self._told_slow:
            self._told_slow.add((kind, rank))
            self._tell(f"warning: {text}")
            self._collector.recorder.add_incident("straggler", text, ranks=[rank], causes=[kind])


@dataclass(frozen=True)
class _Spent:
    """What a rank has done between two looks."""

    steps: int
    seconds: Mapping[str, float]
    """By phase."""


def _spent(before: Mapping[int, Seen], after: Mapping[int, Seen]) -> dict[int, _Spent]:
    found = {}
    for rank in before.keys() & after.keys():
        old, new = before[rank].snapshot, after[rank].snapshot
        seconds = {
            phase: value - old.phase_seconds.get(phase, 0.0)
            for phase, value in new.phase_seconds.items()
        }
        found[rank] = _Spent(new.iteration - old.iteration, seconds)
    return dict(sorted(found.items()))


def _pass_seconds(spent: Mapping[int, _Spent]) -> dict[int, float]:
    """Of forward and backward passes in a step."""
    found = {}
    for rank, one in spent.items():
        seconds = sum(one.seconds.get(phase, 0.0) for phase in (Phase.FORWARD, Phase.BACKWARD))
        if one.steps >= _LEAST_STEPS and seconds > 0:
            found[rank] = seconds / one.steps
    return found


def _starved(spent: Mapping[int, _Spent]) -> dict[int, float]:
    shares = {}
    for rank, one in spent.items():
        total = sum(one.seconds.values())
        if total > 0:
            shares[rank] = one.seconds.get(Phase.DATA, 0.0) / total
    if len(shares) < 2:
        return {}
    usual = statistics.median(shares.values())
    return {rank: s for rank, s in shares.items() if s > _STARVED and s > 2 * usual}


def serve_request(request: Mapping[str, Any], *, rank: int) -> Mapping[str, Any] | None:
    """A rank's answer to what rank 0, or a rank that dumps its calls, asks through liveness.

    {"look": PID, "rank": RANK}: what the kernel says of that rank's process. {"dump": true,
    "by": RANK}: where this rank's flight recorder writes, which it does then.
    """
    if "look" in request:
        found = host_process(int(request["look"]))
        return {
            "looked": request["rank"],
            "exists": found.exists,
            "state": found.state,
            "tracer": found.tracer,
        }
    if not request.get("dump"):
        return None
    by = request.get("by")
    if by is None:
        flight_recorder().request("asked for")
    elif by != rank:
        flight_recorder().follow(by)
    return {"dump": str(flight_recorder().folder.absolute())}
