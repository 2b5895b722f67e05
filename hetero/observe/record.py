"""What this rank is doing: its phase, its waits, its last calls, and its links' counters.

Recording is always on. Every process has one `Recorder`, which the training loop, links and
collectives tell what they do. It never locks, blocks or sends anything. Once a second a `Snapshot`
of it travels to rank 0 with liveness's heartbeat. A snapshot holds ages in seconds and no points in
time, so that no clocks have to agree. Its size does not depend on the number of ranks.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cache
from types import FrameType
from typing import Any, Protocol, TypeVar

from hetero.startup.process import call_in_children

_T = TypeVar("_T")
_now = time.monotonic

CLOCK_SET = "clock set"
"""The kind of incident of a time of day that has jumped; `seconds` says how far."""
THROTTLED = "throttled"
"""The kind of incident of a GPU whose driver slows its clocks for its temperature."""
RECORDED_CALLS = 2000
"""The number of last calls that each rank keeps."""
_MOST_WAITS = 4
_MOST_CALLS = 4
_MOST_LINKS = 16
_MOST_FRAMES = 24
_MOST_RAILS = 8
_MOST_INCIDENTS = 16
_KEPT_INCIDENTS = 1000
_MOST_TEXT = 300
"""Characters of one text in a snapshot."""
_LONG_PHASE_SECONDS = 4.0
_SHOWN_FRAMES = 4
_CLOCK_SECONDS = 5.0
"""By which the time of day may differ from what has passed: NTP slews by less in a second."""
_MOST_BYTES = 48 << 10
"""Of a snapshot as JSON; liveness takes 64 KiB. One that is larger leaves its details out."""


class Phase(StrEnum):
    """What a rank's main thread does. On a GPU: what it enqueues, or waits for."""

    START = "start"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    FORWARD_BACKWARD = "forward-backward"
    WAIT_PREVIOUS = "wait prev"
    WAIT_NEXT = "wait next"
    WAIT_BOTH = "wait both"
    WAIT_ALL = "wait all"
    GRAD_SYNC = "grad sync"
    EMBEDDING = "embedding"
    OPTIMIZER = "optimizer"
    SAVE = "save"
    LOAD = "load"
    EVALUATION = "evaluation"
    OTHER = "other"
    SCRIPT = "script"
    """All of a script's time: what it does between its calls of groups is not known."""


WAITING = frozenset(
    {Phase.WAIT_PREVIOUS, Phase.WAIT_NEXT, Phase.WAIT_BOTH, Phase.WAIT_ALL}
    | {Phase.GRAD_SYNC, Phase.EMBEDDING}
)
"""The phases in which a rank waits for others, or may."""


@dataclass(slots=True, eq=False)
class CallEntry:
    """A collective, send or receive: one entry of the flight recorder."""

    group: str
    sequence: int
    """In the group, from 1; of a message, among those of its sender, receiver and tag there."""
    operation: str
    dtype: str = ""
    sizes: tuple[tuple[int, ...], ...] = ()
    """Shapes of its tensors."""
    peer: int | None = None
    """The other rank of a send or receive."""
    reduction: str = ""
    created: int = field(default_factory=time.time_ns)
    """Nanoseconds since the epoch, as are the other times; 0: not yet."""
    started: int = 0
    completed: int = 0
    error: str = ""
    stack: tuple[tuple[str, int, str], ...] = ()
    """File, line and function, innermost first; with HETERO_RECORD_STACKS=1 only."""
    tag: int = 0
    """Of a message."""
    timeout: float = 0.0
    """Seconds; 0 if it has none."""
    iteration: int = 0
    """Of training, in which it was made; 0 elsewhere."""
    has_ended: Callable[[], bool] | None = None
    """For a transfer whose end nobody tells: returns whether it has ended. Never blocks."""
    since: float = field(default_factory=time.monotonic)
    """When it was made, by a clock that nobody sets."""

    @property
    def state(self) -> str:
        """As PyTorch's flight recorder names it. A call that has failed has not completed."""
        if self.completed and not self.error:
            return "completed"
        return "started" if self.started else "scheduled"

    def __str__(self) -> str:
        where = (
            ""
            if self.peer is None
            else f" {'to' if self.operation == 'send' else 'from'} rank {self.peer}"
        )
        return f"{self.operation}{where} as number {self.sequence} of {self.group}"


@dataclass(frozen=True, kw_only=True)
class GroupEntry:
    """A group of ranks that make collective calls."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks, in the order of the group."""
    backend: str
    description: str = ""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What a thread of this rank is blocked in."""

    what: str
    """As in 'receive message 12 from rank 1'."""
    seconds: float
    peers: tuple[int, ...] = ()
    """The global ranks of which at least one has not come; empty if that is not known."""
    group: str = ""
    """The group of the call; empty for a link."""
    sequence: int = 0
    message: int | None = None
    """The number, from 0, of the message of a link that this rank is to receive."""


@dataclass(frozen=True, kw_only=True)
class CallState:
    """One of the last calls."""

    group: str
    sequence: int
    operation: str
    state: str
    seconds: float
    """Since it was made, or since it completed."""
    peer: int | None = None
    sizes: tuple[tuple[int, ...], ...] = ()
    in_library: bool = False
    """Whether it is a call of a vendor's library that has not returned."""


@dataclass(frozen=True, kw_only=True)
class RailState:
    """One of a link's parallel connections."""

    name: str
    bytes_sent: int = 0
    state: str = "up"
    """"up", "slow" or "lost"."""
    bytes_per_second: float = 0.0
    """As measured when it last sent; 0: unknown."""


@dataclass(frozen=True, kw_only=True)
class LinkState:
    """One link's counters since it was opened."""

    peer: int
    transport: str = ""
    is_boundary: bool = False
    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    wait_seconds: float = 0.0
    queued: int = 0
    """Messages posted here and not completed."""
    sends_queued: int = 0
    """Those of them that it sends and that may wait for this rank; the rest is on its way."""
    oldest_seconds: float = 0.0
    """The age of the oldest of them."""
    oldest: str = ""
    """That message, as in 'receive message 12'."""
    timeout: float = 0.0
    """Seconds until that is an error."""
    retransmitted: int = 0
    """Entries of lost rails that were sent again over others."""
    rails: tuple[RailState, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """What the kernel says of this process."""

    main_thread: str = ""
    """The state in /proc: R running, S sleeping, D in disk sleep."""
    cpu: float = 0.0
    """CPU seconds a second of the main thread."""
    queued: float = 0.0
    """Seconds a second in which it could have run, and others had the cores."""
    major_faults: float = 0.0
    """Pages read from disk or swap a second."""
    resident_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank's record at one time."""

    rank: int
    pid: int
    host: str
    phase: str = Phase.START
    seconds: float = 0.0
    """In this phase."""
    iteration: int = 0
    """The one under way; 0 before the first."""
    is_evaluating: bool = False
    micro_batch: int = 0
    """The last of this iteration whose forward pass was begun, from 1."""
    gradients: int = 0
    """Backward passes begun in this iteration."""
    tokens: int = 0
    """Of the whole job, since the run began."""
    iteration_seconds: float = 0.0
    """Of the last complete iteration."""
    data_wait_seconds: float = 0.0
    """Blocked on the data loader, since the run began."""
    memory_bytes: int = 0
    """Peak of the device's allocations."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """Time in each phase, since the run began."""
    waits: tuple[Wait, ...] = ()
    """The oldest first."""
    calls: tuple[CallState, ...] = ()
    """The oldest that are not completed, those inside a library first; else the last one."""
    frame: str = ""
    """In a long phase: where the main thread is, the innermost functions first."""
    links: tuple[LinkState, ...] = ()
    process: ProcessState = ProcessState()
    values: Mapping[str, float] = field(default_factory=dict)
    """Of the last iteration, on ranks that know them: loss, grad_norm, learning_rate and so on."""
    incidents: tuple[Mapping[str, Any], ...] = ()
    """Those since the previous snapshot."""

    @property
    def is_waiting(self) -> bool:
        return self.phase in WAITING or bool(self.waits)

    def to_json(self) -> bytes:
        """One line of 48 KiB at most, without its end."""
        line = json.dumps(asdict(self), separators=(",", ":")).encode()
        if len(line) <= _MOST_BYTES:
            return line
        return replace(self, waits=(), calls=(), links=(), values={}, incidents=()).to_json()

    @classmethod
    def from_json(cls, line: bytes) -> Snapshot:
        """Raises ValueError, KeyError or TypeError for anything else than `to_json` writes."""
        values = json.loads(line)
        values["waits"] = tuple(Wait(**_tuples(wait)) for wait in values["waits"])
        values["calls"] = tuple(CallState(**_tuples(call)) for call in values["calls"])
        values["links"] = tuple(
            LinkState(**{**link, "rails": tuple(RailState(**rail) for rail in link["rails"])})
            for link in values["links"]
        )
        values["process"] = ProcessState(**values["process"])
        values["incidents"] = tuple(values["incidents"])
        return cls(**values)


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of JSON with tuples in place of lists."""

    def as_tuple(value: Any) -> Any:
        return tuple(map(as_tuple, value)) if isinstance(value, list) else value

    return {name: as_tuple(value) for name, value in values.items()}


class Recorded(Protocol):
    """A link: what the recorder asks of it. Called from any thread."""

    def state(self) -> LinkState | None: ...


SpanListener = Callable[[str, float, float], None]


class Recorder:
    """What one process does. Any thread may call any method; none blocks."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.host = socket.gethostname()
        self.iteration = 0
        self.micro_batch = 0
        self.gradients = 0
        self.tokens = 0
        self.iteration_seconds = 0.0
        self.data_wait_seconds = 0.0
        self.is_evaluating = False
        self.values: Mapping[str, float] = {}
        self.memory: Callable[[], int] = lambda: 0
        """Returns the peak of the device's allocations."""
        self.calls: deque[CallEntry] = deque(maxlen=RECORDED_CALLS)
        self.library_calls: Callable[[], Sequence[CallEntry]] | None = None
        """Returns the calls inside a vendor's library that have not returned."""
        self.groups: dict[str, GroupEntry] = {}
        """By name: those that this rank is in."""
        self.on_failure: Callable[[str], None] | None = None
        """Called, from any thread, with the error of each group or link that fails."""
        self.on_message: Callable[[bool, bool], None] | None = None
        """Called with each message of the pipeline, once it is posted or has been received: whether
        this rank received it, and whether it goes forward, from a stage to the next."""
        self.keeps_stacks = os.environ.get("HETERO_RECORD_STACKS", "0") == "1"
        self._iterations: deque[tuple[int, int]] = deque(maxlen=RECORDED_CALLS)
        """When the last ones began, in nanoseconds since the epoch."""
        self._phase: tuple[str, float] = (Phase.START, time.monotonic())
        self._outer: list[str] = []
        self._span_listeners: tuple[SpanListener, ...] = ()
        self._phase_seconds: defaultdict[str, float] = defaultdict(float)
        self._waits: dict[int, tuple[Any, float]] = {}
        """By thread: what it waits for, and since when."""
        self._links: weakref.WeakSet[Any] = weakref.WeakSet()
        self._incidents: deque[Mapping[str, Any]] = deque(maxlen=_KEPT_INCIDENTS)
        self._unsent: deque[Mapping[str, Any]] = deque(maxlen=_KEPT_INCIDENTS)
        self._numbers = itertools.count(1)
        self._clock = _time_of_day_ahead()
        self._process = _ProcessReader()
        call_in_children(self, Recorder._forget)

    def _forget(self) -> None:
        """In a forked child, which is no rank."""
        self.calls.clear()
        self._links = weakref.WeakSet()
        self._waits.clear()
        self._span_listeners = ()

    @property
    def phase(self) -> str:
        return self._phase[0]

    @property
    def phase_since(self) -> float:
        """When it began, by `time.monotonic()`."""
        return self._phase[1]

    def enter(self, phase: str) -> None:
        """Begin a phase inside the current one. Main thread."""
        # As `_set`, of which a call would cost as much: steps have dozens of these.
        now = _now()
        before, since = self._phase
        self._outer.append(before)
        self._phase = (phase, now)
        self._phase_seconds[before] += now - since
        if self._span_listeners:
            self._tell(before, since, now)

    def leave(self) -> None:
        """End it, and go back to the phase around it."""
        now = _now()
        before, since = self._phase
        self._phase = (self._outer.pop() if self._outer else Phase.OTHER, now)
        self._phase_seconds[before] += now - since
        if self._span_listeners:
            self._tell(before, since, now)

    def set_phase(self, phase: str) -> None:
        """Begin a phase in place of all that were entered."""
        self._outer.clear()
        self._set(phase)

    def rename(self, phase: str) -> None:
        """Count the phase that has just begun as another."""
        self._phase = (phase, self._phase[1])

    def _set(self, phase: str) -> None:
        now = _now()
        before, since = self._phase
        self._phase = (phase, now)
        self._phase_seconds[before] += now - since
        self._tell(before, since, now)

    def _tell(self, phase: str, begin: float, end: float) -> None:
        for listener in self._span_listeners:
            listener(phase, begin, end)

    def add_span_listener(self, listener: SpanListener) -> None:
        """Call `listener`, in the main thread, with each phase as it ends.

        Its arguments are the phase, and its begin and end by `time.monotonic()`. A phase that was
        interrupted by one inside it comes in pieces, so that no two spans overlap. It must not
        raise.
        """
        self._span_listeners = (*self._span_listeners, listener)

    def remove_span_listener(self, listener: SpanListener) -> None:
        """Undo `add_span_listener`. Nothing if it was not added."""
        self._span_listeners = tuple(other for other in self._span_listeners if other != listener)

    def begin_iteration(self, iteration: int) -> None:
        self.iteration = iteration
        self._iterations.append((time.time_ns(), iteration))
        self.micro_batch = self.gradients = 0
        self.set_phase(Phase.OTHER)

    def iteration_at(self, when: int) -> int:
        """The one under way at a time in nanoseconds since the epoch; 0 if that is not known."""
        begun = list(self._iterations)
        at = bisect.bisect_right(begun, (when, 1 << 62))
        return begun[at - 1][1] if at else 0

    def end_iteration(self, *, seconds: float, tokens: int, values: Mapping[str, float]) -> None:
        """`tokens`: of the whole job so far; `values` as in a Snapshot."""
        self.iteration_seconds, self.tokens, self.values = seconds, tokens, values
        self.set_phase(Phase.OTHER)

    def add_call(self, entry: CallEntry) -> None:
        """Keep a call that has just been made."""
        entry.iteration = self.iteration
        if self.keeps_stacks:
            entry.stack = _stack_of_caller()
        self.calls.append(entry)

    def add_group(self, entry: GroupEntry) -> None:
        """Know a group, by whose name calls refer to it."""
        self.groups[entry.name] = entry

    def report_failure(self, error: str) -> None:
        """A group or a link has failed: the calls are to be kept. Returns at once."""
        if self.on_failure is not None:
            self.on_failure(error)

    def begin_wait(self, subject: Any) -> None:
        """This thread blocks. `subject.as_wait(seconds)` returns the Wait, when it is asked for."""
        self._waits[threading.get_ident()] = (subject, time.monotonic())

    def end_wait(self) -> None:
        self._waits.pop(threading.get_ident(), None)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """`enter` and `leave` around the body."""
        self.enter(phase)
        try:
            yield
        finally:
            self.leave()

    def add_link(self, link: Recorded) -> None:
        """Include a link's counters, as long as it lives."""
        self._links.add(link)

    def links(self) -> list[Recorded]:
        return list(self._links)

    def add_incident(self, kind: str, text: str, **more: Any) -> None:
        """Keep what happened once, such as a rail that is lost. Rank 0 collects those of all.

        Args:
            kind: a few words, equal for all of a kind.
            text: a sentence with the cause.
            more: values that JSON has, for programs: a few short ones.
        """
        incident = {
            "time": time.time(),
            "rank": self.rank,
            "number": next(self._numbers),
            "kind": kind,
            "text": text[:_MOST_TEXT],
            "iteration": self.iteration,
            **more,
        }
        self._incidents.append(incident)
        self._unsent.append(incident)

    def incidents(self, *, most: int = _KEPT_INCIDENTS) -> list[Mapping[str, Any]]:
        """This rank's last incidents, the oldest first, whether or not a snapshot had them.

        `rank` and `number` together name one.
        """
        return copied(self._incidents)[-most:]

    def snapshot(self) -> Snapshot:
        """What is so now. Called by the heartbeat's thread."""
        now, wall = time.monotonic(), time.time_ns()
        phase, since = self._phase
        seconds = dict(self._phase_seconds)
        seconds[phase] = seconds.get(phase, 0.0) + now - since
        self.check_clock()
        incidents: list[Mapping[str, Any]] = []
        with suppress(IndexError):
            while len(incidents) < _MOST_INCIDENTS:
                incidents.append(self._unsent.popleft())
        return Snapshot(
            rank=self.rank,
            pid=os.getpid(),
            host=self.host,
            phase=phase,
            seconds=now - since,
            iteration=self.iteration,
            is_evaluating=self.is_evaluating,
            micro_batch=self.micro_batch,
            gradients=self.gradients,
            tokens=self.tokens,
            iteration_seconds=self.iteration_seconds,
            data_wait_seconds=self.data_wait_seconds,
            memory_bytes=self.memory(),
            phase_seconds={name: round(value, 4) for name, value in seconds.items() if value},
            waits=self.open_waits(),
            calls=self._shown_calls(wall, is_long=now - since > _LONG_PHASE_SECONDS),
            frame=_frame_of_main_thread() if now - since > _LONG_PHASE_SECONDS else "",
            links=self._link_states(),
            process=self._process.read(),
            values=self.values,
            incidents=tuple(incidents),
        )

    def check_clock(self) -> bool:
        """Whether the time of day has been set since the last look; if so an incident tells it."""
        before, self._clock = self._clock, _time_of_day_ahead()
        if abs(moved := self._clock - before) < _CLOCK_SECONDS:
            return False
        way = "back" if moved < 0 else "forward"
        self.add_incident(
            CLOCK_SET, f"{way} by {abs(moved):.0f} s", host=self.host, seconds=round(moved, 1)
        )
        return True

    def open_waits(self) -> tuple[Wait, ...]:
        """What threads of this rank wait for, the oldest first."""
        now = time.monotonic()
        waits = [subject.as_wait(now - since) for subject, since in list(self._waits.values())]
        return tuple(sorted(waits, key=lambda wait: -wait.seconds)[:_MOST_WAITS])

    def _link_states(self) -> tuple[LinkState, ...]:
        states = [state for link in self.links() if (state := link.state()) is not None]
        kept = sorted(states, key=lambda state: state.peer)[:_MOST_LINKS]
        return tuple(replace(state, rails=state.rails[:_MOST_RAILS]) for state in kept)

    def _shown_calls(self, now: int, *, is_long: bool) -> tuple[CallState, ...]:
        """In a long phase those inside a library come first; to ask for them takes milliseconds."""
        inside = self.library_calls() if is_long and self.library_calls is not None else []
        return (
            *(_call_state(entry, now, in_library=True) for entry in inside[:_MOST_CALLS]),
            *_last_calls(self.last_calls(), now),
        )

    def last_calls(self) -> list[CallEntry]:
        """A copy of `calls`, the oldest first; those that have ended are completed."""
        entries = copied(self.calls)
        for entry in entries:
            if entry.has_ended is not None and entry.has_ended():
                entry.completed, entry.has_ended = time.time_ns(), None
        return entries


def _time_of_day_ahead() -> float:
    """Of the monotonic clock, in seconds: changes only where the clock is set."""
    return time.time() - time.monotonic()


def _stack_of_caller() -> tuple[tuple[str, int, str], ...]:
    frame: FrameType | None = sys._getframe(2)
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


def copied(entries: deque[_T]) -> list[_T]:
    """A list of a queue to which other threads may add meanwhile."""
    while True:
        try:
            return list(entries)
        except RuntimeError:  # one of them has
            continue


def _last_calls(entries: Sequence[CallEntry], now: int) -> tuple[CallState, ...]:
    open_ones = [entry for entry in entries if not entry.completed][:_MOST_CALLS]
    return tuple(_call_state(entry, now) for entry in open_ones or entries[-1:])


def _call_state(entry: CallEntry, now: int, *, in_library: bool = False) -> CallState:
    return CallState(
        group=entry.group,
        sequence=entry.sequence,
        operation=entry.operation,
        state=entry.state,
        seconds=_age(entry, now),
        peer=entry.peer,
        sizes=entry.sizes[:4],
        in_library=in_library,
    )


def _age(entry: CallEntry, now: int) -> float:
    """Seconds since it was made, or since it completed."""
    if not entry.completed:
        return time.monotonic() - entry.since
    return max(0.0, (now - entry.completed) * 1e-9)


def _frame_of_main_thread() -> str:
    """Where the main thread is: its innermost functions, that of the caller last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    shown: list[str] = []
    while frame is not None and len(shown) < _SHOWN_FRAMES:
        code = frame.f_code
        shown.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return " < ".join(shown)[:_MOST_TEXT]


class _ProcessReader:
    """Reads what the kernel counts of this process's main thread."""

    def __init__(self) -> None:
        self._tick = os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._before: tuple[float, int, int, int] | None = None

    def read(self) -> ProcessState:
        """The rates are since the previous call."""
        pid = os.getpid()
        try:
            # After the command's name, which may hold anything: the state is the third field.
            with open(f"/proc/self/task/{pid}/stat", "rb") as file:
                values = file.read().rpartition(b")")[2].split()
            with open("/proc/self/statm", "rb") as file:
                resident = int(file.read().split()[1]) * self._page
        except OSError:
            return ProcessState()
        queued = 0
        # Not every kernel counts it.
        with suppress(OSError), open(f"/proc/self/task/{pid}/schedstat", "rb") as file:
            queued = int(file.read().split()[1])
        now, faults = time.monotonic(), int(values[9])
        ticks = int(values[11]) + int(values[12])
        before = self._before or (now - 1.0, ticks, faults, queued)
        self._before = (now, ticks, faults, queued)
        elapsed = max(1e-3, now - before[0])
        return ProcessState(
            main_thread=values[0].decode(),
            cpu=round((ticks - before[1]) / self._tick / elapsed, 3),
            queued=round((queued - before[3]) * 1e-9 / elapsed, 3),
            major_faults=round((faults - before[2]) / elapsed, 1),
            resident_bytes=resident,
        )


@cache
def recorder() -> Recorder:
    """This process's recorder."""
    return Recorder()
