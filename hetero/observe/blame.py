"""Who holds a run up: from the records of all ranks to sentences. Pure functions.

A rank that waits points to the ranks that it waits for: to the peers of what its threads are
blocked in, else to those that its phase waits for. Following that from rank to rank ends at one
that waits for nobody, or comes back to where it was: that is told.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from hetero.observe.collect import Seen
from hetero.observe.record import WAITING, Phase, Snapshot, Wait

_SHORT_SECONDS = 1.0
"""A wait that has only begun is none: its peer may be on its way."""
_TRANSIT_SECONDS = 2.0
"""After which a message that was sent should have arrived."""
_SPINNING = 0.9
"""Seconds a second in which a main thread that only computes runs, or waits for a core."""
_SWAPPING = 200.0
"""Major page faults a second."""
_MOST_FINDINGS = 4
_ORDER: Mapping[str, int] = {
    Phase.GRAD_SYNC: 2,
    Phase.EMBEDDING: 2,
    Phase.WAIT_ALL: 3,
    Phase.OPTIMIZER: 4,
    Phase.SAVE: 5,
    Phase.EVALUATION: 5,
}
"""How far in an iteration a phase is; the passes and their waits are 1."""


class Cause(StrEnum):
    """What a rank at the end of a chain does."""

    SILENT = "silent"
    STOPPED = "stopped"
    DEBUGGED = "debugged"
    GONE = "gone"
    UNREACHABLE = "unreachable"
    NETWORK = "network"
    DATA = "data"
    SAVE = "save"
    LIBRARY = "library"
    SWAPPING = "swapping"
    DISK = "disk"
    COMPUTE = "compute"
    CYCLE = "cycle"
    BUSY = "busy"


@dataclass(frozen=True, kw_only=True)
class HostProcess:
    """What a host's kernel says of a process."""

    exists: bool
    state: str = ""
    """As in /proc: T stopped, t held by a tracer, D in disk sleep."""
    tracer: int = 0
    """The process that traces it; 0: none."""

    @property
    def is_held(self) -> bool:
        """Whether it cannot do anything: no record of it will come."""
        return not self.exists or bool(self.tracer) or self.state in ("T", "t", "Z")


def host_process(pid: int) -> HostProcess:
    """Of this host."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return HostProcess(exists=False)
    values = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return HostProcess(
        exists=True, state=values.get("State", "")[:1], tracer=int(values.get("TracerPid", "0"))
    )


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What is known of a run beside the records."""

    names: Mapping[int, str] = field(default_factory=dict)
    """As in 'rank 5 on b (stage 1, amd)'."""
    previous: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By rank: those of the previous stage that it receives activations from."""
    following: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    replicas: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By rank: those that it reduces gradients with."""
    peers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By rank: the others of its stage and vendor, which have the same to compute."""
    ends: tuple[int, ...] = ()
    """The ranks of the first and the last stage, which share an embedding."""
    processes: Mapping[int, HostProcess] = field(default_factory=dict)
    """Of ranks whose record is late, as far as another process of their host has looked."""
    answers: Mapping[int, bool] = field(default_factory=dict)
    """Of other such ranks: whether the kernel of their host acknowledges what is sent to it."""

    def name(self, rank: int) -> str:
        return self.names.get(rank, f"rank {rank}")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The end of one chain of waits."""

    cause: Cause
    ranks: tuple[int, ...]
    """At fault: one, or all of a cycle."""
    waiting: tuple[int, ...]
    """Who waits for them, directly or not."""
    sentence: str


def blame(
    seen: Mapping[int, Seen],
    surroundings: Surroundings,
    *,
    silent_after: float,
    expected: Collection[int] = (),
) -> list[Finding]:
    """The ends of all chains of waits; first the one for which most ranks wait.

    Args:
        seen: the last record of each rank.
        silent_after: the age at which a record is too old; see `liveness.silent_after`.
        expected: all ranks; one without a record counts as silent.
    """
    graph = _Graph(seen, surroundings, expected, silent_after=silent_after)
    ends: dict[tuple[int, ...], list[list[int]]] = {}
    for rank in sorted({*seen, *expected}):
        chain = graph.chain(rank)
        if len(chain) > 1 or graph.is_silent(rank):
            ends.setdefault(graph.end_of(chain), []).append(chain)
    findings = [graph.finding(end, chains) for end, chains in graph.by_host(ends).items()]
    told = {rank for finding in findings for rank in (*finding.ranks, *finding.waiting)}
    findings += graph.stuck_in_library(told)
    findings.sort(key=lambda finding: (-len(finding.waiting), finding.ranks))
    return findings[:_MOST_FINDINGS]


class _Graph:
    def __init__(
        self,
        seen: Mapping[int, Seen],
        surroundings: Surroundings,
        expected: Collection[int],
        *,
        silent_after: float,
    ) -> None:
        self._silent_after = silent_after
        self._seen, self._about = seen, surroundings
        self._all = sorted({*seen, *expected})

    def _snapshot(self, rank: int) -> Snapshot | None:
        found = self._seen.get(rank)
        return None if found is None else found.snapshot

    def is_silent(self, rank: int) -> bool:
        """Returns whether its last record is too old. A silent rank is reported in any case."""
        found, process = self._seen.get(rank), self._about.processes.get(rank)
        if process is not None and process.is_held:
            return True
        if not self._about.answers.get(rank, True):
            return True
        return found is None or found.age > self._silent_after

    def chain(self, rank: int) -> list[int]:
        """From a rank along what each waits for. A rank that comes twice ends it: a cycle."""
        found = [rank]
        while True:
            if (sender := self._sender_of_lost(found[-1])) is not None:
                return [*found, sender]
            if (following := self._next(found[-1])) is None:
                return found
            if following in found:
                return [*found, following]
            found.append(following)

    def end_of(self, chain: Sequence[int]) -> tuple[int, ...]:
        """The ranks at its end: one, all of a cycle, or both ends of a network that loses."""
        if len(chain) > 1 and self._sender_of_lost(chain[-2]) == chain[-1]:
            return chain[-2], chain[-1]
        if chain[-1] in chain[:-1]:
            return tuple(sorted(chain[chain.index(chain[-1]) : -1]))
        return (chain[-1],)

    def _sender_of_lost(self, rank: int) -> int | None:
        """Whose message this rank waits for although it was sent, and has left its sender."""
        snapshot = self._snapshot(rank)
        if snapshot is None or self.is_silent(rank) or _is_held(snapshot):
            return None
        wait = self._oldest_wait(snapshot)
        if wait is None or wait.message is None or wait.seconds < _TRANSIT_SECONDS:
            return None
        (peer,) = wait.peers
        other = self._snapshot(peer)
        # What a process has sent that stands still may still be in its own hands.
        if other is None or self.is_silent(peer) or _is_held(other):
            return None
        if other.seconds + self._seen[peer].age < _TRANSIT_SECONDS:
            return None
        links = [link for link in other.links if link.peer == rank and link.is_boundary]
        if len(links) != 1 or links[0].messages_sent - links[0].sends_queued <= wait.message:
            return None
        return peer

    def _lost(self, receiver: int, sender: int) -> str:
        here, there = self._host_of(receiver), self._host_of(sender)
        between = f"the network between {there} and {here}"
        if here == there:
            between = "the link between them"
        return (
            f"{self._about.name(receiver)} {self._waits(receiver, sender)}, which has sent it: "
            f"{between} does not carry it"
        )

    def by_host(
        self, ends: Mapping[tuple[int, ...], list[list[int]]]
    ) -> dict[tuple[int, ...], list[list[int]]]:
        """One end for all ranks of a host that does not answer: the one that most wait for."""
        found, of_host = dict(ends), dict[str, list[tuple[int, ...]]]()
        for end in ends:
            if not self._about.answers.get(end[0], True):
                of_host.setdefault(self._host_of(end[0]), []).append(end)
        for same in of_host.values():
            first, *others = sorted(same, key=lambda end: (-len(ends[end]), end))
            for other in others:
                waiting = [chain for chain in found.pop(other) if len(chain) > 1]
                found[first] = [*found[first], *waiting]
        return found

    def _next(self, rank: int) -> int | None:
        """The rank that this one waits for; of several the one that most likely is at fault."""
        known = set(self._all)
        targets = [t for t in self._targets(rank) if t != rank and t in known]
        if not targets:
            return None

        def weight(target: int) -> tuple[bool, bool, float]:
            snapshot = self._snapshot(target)
            if snapshot is None:
                return True, True, 0.0
            is_idle = snapshot.is_waiting and bool(self._targets(target))
            return self.is_silent(target), not is_idle, snapshot.seconds

        return max(targets, key=weight)

    def _targets(self, rank: int) -> tuple[int, ...]:
        snapshot = self._snapshot(rank)
        if snapshot is None or self.is_silent(rank) or _is_held(snapshot):
            return ()
        if (wait := self._oldest_wait(snapshot)) is not None:
            # The root of a collective may wait itself.
            if peers := tuple(peer for peer in wait.peers if peer != rank):
                return peers
            if wait.group and (members := self._behind_in_group(rank, wait)):
                return members
        phase, about = snapshot.phase, self._about
        if snapshot.seconds < _SHORT_SECONDS:
            return ()
        if phase == Phase.WAIT_PREVIOUS:
            return about.previous.get(rank, ())
        if phase == Phase.WAIT_NEXT:
            return about.following.get(rank, ())
        if phase == Phase.WAIT_BOTH:
            return (*about.previous.get(rank, ()), *about.following.get(rank, ()))
        if phase in (Phase.GRAD_SYNC, Phase.EMBEDDING, Phase.WAIT_ALL):
            groups: dict[str, Sequence[int]] = {
                Phase.GRAD_SYNC: about.replicas.get(rank, ()),
                Phase.EMBEDDING: about.ends,
            }
            if behind := self._behind(rank, groups.get(phase) or self._all):
                return behind
        return self._outside_library(rank)

    def _outside_library(self, rank: int) -> tuple[int, ...]:
        """If this rank is inside a call of its library: those that are in none, and do not wait."""
        if not self._is_in_library(rank):
            return ()
        found = []
        for other in self._all:
            snapshot = self._snapshot(other)
            if other == rank or snapshot is None or self._is_in_library(other):
                continue
            if self.is_silent(other) or self._oldest_wait(snapshot) is None:
                found.append(other)
        return tuple(found)

    def _is_in_library(self, rank: int) -> bool:
        snapshot = self._snapshot(rank)
        return snapshot is not None and any(call.in_library for call in snapshot.calls)

    def stuck_in_library(self, told: Collection[int]) -> list[Finding]:
        """Calls of a library that several ranks are in, of which none waits for any other rank."""
        inside: dict[tuple[str, int, str], list[int]] = {}
        longest = 0.0
        for rank in self._all:
            snapshot = self._snapshot(rank)
            if snapshot is None or rank in told:
                continue
            if call := next((c for c in snapshot.calls if c.in_library), None):
                inside.setdefault((call.group, call.sequence, call.operation), []).append(rank)
                longest = max(longest, call.seconds)
        return [
            Finding(
                cause=Cause.LIBRARY,
                ranks=tuple(ranks),
                waiting=(),
                sentence=f"{', '.join(map(self._about.name, ranks[:_MOST_FINDINGS]))}"
                f"{', ...' if len(ranks) > _MOST_FINDINGS else ''} are inside the same call of "
                f"their vendor's library for {longest:.0f} s: {operation} as number {sequence} of "
                f"group {group}; no rank is missing in it: the library hangs, or the network that "
                "it uses",
            )
            for (group, sequence, operation), ranks in inside.items()
            if len(ranks) > 1
        ]

    def _oldest_wait(self, snapshot: Snapshot) -> Wait | None:
        waits = [wait for wait in snapshot.waits if wait.seconds >= _SHORT_SECONDS]
        return waits[0] if waits else None

    def _behind_in_group(self, rank: int, wait: Wait) -> tuple[int, ...]:
        """Ranks whose last call of the group comes before this one."""
        found = []
        for other in self._all:
            snapshot = self._snapshot(other)
            calls = [] if snapshot is None else [c for c in snapshot.calls if c.group == wait.group]
            if other != rank and calls and max(call.sequence for call in calls) < wait.sequence:
                found.append(other)
        return tuple(found)

    def _behind(self, rank: int, members: Sequence[int]) -> tuple[int, ...]:
        """Those that have not come as far as this rank."""
        own = self._progress(rank)
        known = set(self._all)
        return tuple(m for m in members if m in known and m != rank and self._progress(m) < own)

    def _progress(self, rank: int) -> tuple[int, int]:
        snapshot = self._snapshot(rank)
        if snapshot is None:
            return (0, 0)
        return snapshot.iteration, _ORDER.get(snapshot.phase, 1)

    def finding(self, end: tuple[int, ...], chains: Sequence[Sequence[int]]) -> Finding:
        ended = {chain[-1] for chain in chains}  # of a host that does not answer, all its ranks
        waiting = sorted({rank for chain in chains for rank in chain} - set(end) - ended)
        if len(end) > 1 and self._sender_of_lost(end[0]) == end[1]:
            return Finding(
                cause=Cause.NETWORK,
                ranks=end,
                waiting=tuple(waiting),
                sentence=self._lost(*end) + self._others(waiting),
            )
        if len(end) > 1:
            return Finding(
                cause=Cause.CYCLE,
                ranks=end,
                waiting=tuple(waiting),
                sentence=self._cycle(end) + self._others(waiting),
            )
        (rank,) = end
        cause, what = self._doing(rank)
        longest = max(
            (chain for chain in chains if chain[-1] == rank),
            key=lambda chain: (len(chain) > 1, self._wait_seconds(chain[0]), -len(chain)),
        )
        if len(longest) == 1:
            return Finding(
                cause=cause, ranks=end, waiting=(), sentence=f"{self._about.name(rank)} {what}"
            )
        first, middle = longest[0], longest[1:-1]
        sentence = f"{self._about.name(first)} {self._waits(first, longest[1])}, which "
        for here, there in zip(middle, longest[2:], strict=True):
            sentence += f"{self._waits(here, there)}, which "
        others = [other for other in waiting if other not in longest]
        return Finding(
            cause=cause,
            ranks=end,
            waiting=tuple(waiting),
            sentence=f"{sentence}{what}{self._others(others)}",
        )

    def _others(self, ranks: Sequence[int]) -> str:
        if not ranks:
            return ""
        return f"; {_ranks(ranks)} wait{'s' * (len(ranks) == 1)} for that too"

    def _wait_seconds(self, rank: int) -> float:
        snapshot = self._snapshot(rank)
        if snapshot is None:
            return 0.0
        wait = self._oldest_wait(snapshot)
        age = self._seen[rank].age
        return age + (wait.seconds if wait is not None else snapshot.seconds)

    def _waits(self, rank: int, target: int) -> str:
        """As 'waits 31 s for message 12 of ... from rank 1 on a'."""
        snapshot = self._snapshot(rank)
        assert snapshot is not None
        wait, name = self._oldest_wait(snapshot), self._about.name(target)
        seconds = f"waits {self._wait_seconds(rank):.0f} s"
        if wait is None:
            return f"{seconds} in phase '{snapshot.phase}' for {name}"
        for way in ("from", "to"):
            message, found, _ = wait.what.partition(f" {way} rank {target}")
            if found:
                return f"{seconds} for {message} {way} {name}"
        return f"{seconds} in {wait.what} for {name}"

    def _cycle(self, ranks: tuple[int, ...]) -> str:
        told = []
        for rank in ranks:
            target = self._next(rank)
            if target is not None:
                told.append(f"{self._about.name(rank)} {self._waits(rank, target)}")
        return f"these ranks wait for each other: {'; '.join(told)}"

    def _doing(self, rank: int) -> tuple[Cause, str]:
        """What the rank at the end of a chain does, as a clause."""
        snapshot = self._snapshot(rank)
        if snapshot is None:
            return Cause.SILENT, "has sent no record yet; see its log"
        if self.is_silent(rank):
            return self._silent(rank, snapshot)
        seconds = self._seen[rank].age + snapshot.seconds
        where = f" (at {snapshot.frame})" if snapshot.frame else ""
        process, phase = snapshot.process, snapshot.phase
        disk = ", in disk sleep: its file system does not answer" * (process.main_thread == "D")
        if _is_held(snapshot):
            return Cause.DEBUGGED, (
                f"is held by a debugger: that has stopped the main thread of its process "
                f"{snapshot.pid}, in phase '{phase}' for {seconds:.0f} s{where}"
            )
        if library := [call for call in snapshot.calls if call.in_library]:
            call = library[0]
            return Cause.LIBRARY, (
                f"is inside its vendor's library for {call.seconds:.0f} s: {call.operation} as "
                f"number {call.sequence} of group {call.group}{where}"
            )
        if process.major_faults > _SWAPPING:
            return Cause.SWAPPING, (
                f"swaps: {process.major_faults:.0f} pages a second are read from disk, in phase "
                f"'{phase}' for {seconds:.0f} s{where}"
            )
        if phase == Phase.DATA:
            return Cause.DATA, f"has been in its data loader for {seconds:.0f} s{disk}{where}"
        if phase == Phase.SAVE:
            return Cause.SAVE, f"has been saving a checkpoint for {seconds:.0f} s{disk}{where}"
        if process.main_thread == "D":
            return Cause.DISK, f"is in disk sleep, in phase '{phase}' for {seconds:.0f} s{where}"
        if phase in WAITING and not snapshot.waits:
            return Cause.BUSY, (
                f"is in phase '{phase}' for {seconds:.0f} s, and in no call of a group or link"
                f"{where}"
            )
        if snapshot.waits:
            wait = self._oldest_wait(snapshot)
            what = f" for {wait.what}" if wait is not None else ""
            return Cause.BUSY, f"waits{what} in phase '{phase}' for {seconds:.0f} s{where}"
        if process.cpu + process.queued > _SPINNING:
            return Cause.COMPUTE, (
                f"computes on one core without an end, in phase '{phase}' for {seconds:.0f} s"
                f"{where}"
            )
        if phase == Phase.SCRIPT:
            return Cause.BUSY, f"is in no call of a group{where}"
        micro_batch = f" of micro-batch {snapshot.micro_batch}" if snapshot.micro_batch else ""
        return Cause.BUSY, f"is in phase '{phase}'{micro_batch} for {seconds:.0f} s{where}"

    def _host_of(self, rank: int) -> str:
        snapshot = self._snapshot(rank)
        return "" if snapshot is None else snapshot.host

    def _others_of_host(self, rank: int) -> str:
        """As ' (with ranks 5, 6)': the others that cannot be reached on the same host."""
        host = self._host_of(rank)
        others = [r for r in self._about.answers if r != rank and self._host_of(r) == host]
        lost = [other for other in sorted(others) if not self._about.answers[other]]
        return f" (with {_ranks(lost)})" if lost else ""

    def _silent(self, rank: int, snapshot: Snapshot) -> tuple[Cause, str]:
        age = self._seen[rank].age
        process = self._about.processes.get(rank)
        last = f"; {age:.0f} s ago it was in phase '{snapshot.phase}'"
        if process is None:
            silence, answers = f"has sent no record for {age:.0f} s", self._about.answers.get(rank)
            if answers is None:
                return Cause.SILENT, (
                    f"{silence}: its process or host hangs, or the network to it{last}"
                )
            if answers:
                return Cause.SILENT, (
                    f"{silence} although its host {snapshot.host} answers: its process "
                    f"{snapshot.pid} hangs, or is stopped{last}"
                )
            return Cause.UNREACHABLE, (
                f"{silence}: its host {snapshot.host}{self._others_of_host(rank)} does not answer "
                f"{self._host_of(0)}, the host of rank 0; it is down, or the network between the "
                f"two is cut{last}"
            )
        if not process.exists or process.state == "Z":
            return Cause.GONE, f"exited: its process {snapshot.pid} is gone{last}"
        if process.tracer:
            return Cause.DEBUGGED, (
                f"is held by a debugger: process {process.tracer} traces its process "
                f"{snapshot.pid}{last}"
            )
        if process.is_held:
            return Cause.STOPPED, (
                f"is stopped: its process {snapshot.pid} got SIGSTOP; continue it with kill -CONT"
                f"{last}"
            )
        if process.state == "D":
            return Cause.DISK, (
                f"is in disk sleep: a file system or device does not answer its process "
                f"{snapshot.pid}, or its cgroup is frozen{last}"
            )
        states = {"R": "running", "S": "sleeping"}
        shown = states.get(process.state, process.state)
        return Cause.SILENT, (
            f"has sent no record for {age:.0f} s although its process {snapshot.pid} exists "
            f"({shown}): a call of C does not give Python's lock back{last}"
        )


def _is_held(snapshot: Snapshot) -> bool:
    """Whether its main thread is stopped, and not the others."""
    return snapshot.process.main_thread in ("t", "T")


def _ranks(ranks: Sequence[int]) -> str:
    """As 'rank 3' or 'ranks 3, 4'."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
