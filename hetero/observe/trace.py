"""What each rank did in a few steps, as one file for Perfetto.

Each rank has a `SpanRecorder`, which keeps its phases, its pipeline's messages and its calls of
groups while it is on. What it kept is a `RankTrace`. Those of all ranks become one file in Chrome's
trace event format, with each rank's clock turned into rank 0's.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hetero.observe.clocks import SHARED, Alignment, Offset
from hetero.observe.record import CallEntry, Phase, Recorder

FILE = "trace.json.gz"
MOST_SPANS = 500_000
"""Of one rank. What follows is left out, and the file says so."""
HOST_TRACK, GPU_TRACK, _CALLS = 1, 2, 3
"""Tracks of a rank, the last one the first of several."""
_TRACKS_OF_A_RANK = 1000
_PASSES = frozenset({Phase.FORWARD, Phase.DATA, Phase.BACKWARD})
"""Phases that belong to one micro-batch."""


class StreamMarks(Protocol):
    """Marks on a GPU's compute stream, as events."""

    def mark(self) -> Any: ...

    def wait(self, mark: Any) -> None: ...

    def milliseconds(self, begin: Any, end: Any) -> float: ...


@dataclass(frozen=True)
class Neighbour:
    """A stage that this rank exchanges messages with: its ranks, and the messages so far."""

    ranks: tuple[int, ...] = ()
    sent: int = 0
    received: int = 0


@dataclass(frozen=True)
class Step:
    """A traced step of one rank. Times by its clock."""

    iteration: int
    begin: float
    end: float
    seconds: float
    """As the training loop measured it, by itself."""


@dataclass(frozen=True)
class Span:
    """A phase, without the phases inside it: a rank's spans do not overlap."""

    phase: str
    begin: float
    end: float
    iteration: int
    """The step that it is part of, or after which it came."""
    micro_batch: int = -1
    """From 0; -1 for a phase of no micro-batch, and in an evaluation."""
    chunk: int = 0
    is_evaluation: bool = False


@dataclass(frozen=True)
class Message:
    """A message of the pipeline, posted or received."""

    is_receive: bool
    is_forward: bool
    """Activations, which go from a stage to the next; else gradients."""
    peer: int
    number: int
    """In its direction, from 1; the same on both ends."""
    time: float
    stream_time: float | None = None
    """When the GPU's compute stream got there."""


@dataclass(frozen=True)
class CallSpan:
    """A collective, or a send or receive of a group."""

    group: str
    sequence: int
    operation: str
    begin: float
    end: float
    peer: int | None = None
    sizes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What one rank kept."""

    rank: int
    host: str
    stage: int = 0
    mesh: int = 0
    vendor: str = ""
    simulated: bool = False
    steps: tuple[Step, ...] = ()
    spans: tuple[Span, ...] = ()
    """Of the host's main thread."""
    stream_spans: tuple[Span, ...] = ()
    """Of the GPU's compute stream; none on a CPU."""
    stream_error: float = 0.0
    """Seconds that the GPU's times may be off by."""
    messages: tuple[Message, ...] = ()
    calls: tuple[CallSpan, ...] = ()
    alignment: Alignment = SHARED
    clock: str = ""
    """Its identity."""
    is_truncated: bool = False
    problem: str = ""
    """Why it kept nothing."""

    @property
    def name(self) -> str:
        played = ", simulated" if self.simulated else ""
        return f"rank {self.rank} on {self.host} (stage {self.stage}, {self.vendor}{played})"

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, line: bytes) -> RankTrace:
        values = json.loads(line)
        for name, kind in (("steps", Step), ("spans", Span), ("stream_spans", Span)):
            values[name] = tuple(kind(**each) for each in values[name])
        values["messages"] = tuple(Message(**each) for each in values["messages"])
        values["calls"] = tuple(
            CallSpan(**{**each, "sizes": tuple(map(tuple, each["sizes"]))})
            for each in values["calls"]
        )
        ends = values["alignment"]
        values["alignment"] = Alignment(Offset(**ends["before"]), Offset(**ends["after"]))
        return cls(**values)


@dataclass(slots=True)
class _Kept:
    """A phase as it ended."""

    phase: str
    begin: float
    end: float
    iteration: int
    number: int
    """Of its pass in the step, from 1; 0 for none."""
    is_evaluation: bool
    mark: Any
    """Of its end, on the GPU's stream."""


@dataclass
class _Anchor:
    """A time of the host at which a mark of the stream was passed."""

    time: float
    mark: Any
    error: float


class SpanRecorder:
    """Listens to a rank's `Recorder` between `begin` and `finish`. Costs nothing at other times.

    Every method is the main thread's.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        marks: StreamMarks | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`marks`: of the GPU, None on a CPU. `now`: the clock that the recorder's spans have."""
        self._recorder, self._marks, self._now = recorder, marks, now
        self.is_on = False
        self._step_begin: float | None = None
        self._steps: list[Step] = []
        self._kept: list[_Kept] = []
        self._messages: list[tuple[bool, bool, int, float, Any]] = []
        self._counts: dict[tuple[bool, bool], int] = {}
        self._wall: tuple[float, int] = (0.0, 0)
        self._anchors: list[_Anchor] = []
        self._is_truncated = False

    def begin(self, previous: Neighbour, following: Neighbour) -> None:
        """Start to record, before a step."""
        self._neighbours = {True: following, False: previous}
        self._counts = {
            (False, True): following.sent,
            (False, False): previous.sent,
            (True, True): previous.received,
            (True, False): following.received,
        }
        if self._marks is not None:
            self._anchors.append(self._anchor(self._marks))
        self._recorder.set_phase(Phase.OTHER)
        self._began = self._now()
        self._wall = (self._began, time.time_ns())
        self._recorder.add_span_listener(self._add_span)
        self._recorder.on_message = self._add_message
        self.is_on = True

    def begin_step(self) -> None:
        """A step begins; its phases follow."""
        if self.is_on:
            self._recorder.set_phase(Phase.OTHER)
            self._step_begin = self._recorder.phase_since

    def end_step(self, *, iteration: int, seconds: float) -> None:
        """It ended where the present phase began, and took what the training loop measured."""
        if self.is_on and self._step_begin is not None:
            end = self._recorder.phase_since
            self._steps.append(Step(iteration, self._step_begin, end, seconds))
            self._step_begin = None

    def _add_span(self, phase: str, begin: float, end: float) -> None:
        if len(self._kept) >= MOST_SPANS:
            self._is_truncated = True
            return
        recorder = self._recorder
        number = recorder.gradients if phase == Phase.BACKWARD else recorder.micro_batch
        self._kept.append(
            _Kept(
                phase,
                max(begin, self._began),
                end,
                recorder.iteration,
                number if phase in _PASSES else 0,
                recorder.is_evaluating,
                None if self._marks is None else self._marks.mark(),
            )
        )

    def _add_message(self, is_receive: bool, is_forward: bool) -> None:
        key = (is_receive, is_forward)
        self._counts[key] += 1
        mark = None if self._marks is None else self._marks.mark()
        if len(self._messages) < MOST_SPANS:
            self._messages.append((*key, self._counts[key], self._now(), mark))

    def stop(self) -> None:
        """Stop to record, after the last step and what follows it."""
        self._recorder.set_phase(Phase.OTHER)
        self._recorder.remove_span_listener(self._add_span)
        self._recorder.on_message = None
        self.is_on = False
        if self._marks is not None:
            self._anchors.append(self._anchor(self._marks))

    def _anchor(self, marks: StreamMarks) -> _Anchor:
        """Waits for the GPU, so it must not be called in a step."""
        tried = []
        for _ in range(5):
            begin, mark = self._now(), marks.mark()
            marks.wait(mark)
            end = self._now()
            tried.append(_Anchor((begin + end) / 2, mark, (end - begin) / 2))
        return min(tried, key=lambda anchor: anchor.error)

    def result(
        self, trace: RankTrace, passes: Callable[[int], Sequence[tuple[int, int]]]
    ) -> RankTrace:
        """`trace`, which says who this rank is, with what it recorded.

        Args:
            passes: takes the number of forward passes of a step, and returns the
                (micro-batch, chunk) of each.
        """
        places = self._places(passes)
        to_host = self._stream_clock() if self._anchors else None
        spans, stream = [], []
        stream_begin = None if to_host is None else self._anchors[0].time
        for kept in self._kept:
            micro_batch, chunk = places.get((kept.iteration, kept.phase, kept.number), (-1, 0))
            if kept.is_evaluation:
                micro_batch, chunk = -1, 0
            what = (kept.iteration, micro_batch, chunk, kept.is_evaluation)
            spans.append(Span(kept.phase, kept.begin, kept.end, *what))
            if to_host is not None and stream_begin is not None:
                end = max(stream_begin, to_host(kept.mark))
                stream.append(Span(kept.phase, stream_begin, end, *what))
                stream_begin = end
        return replace(
            trace,
            steps=tuple(self._steps),
            spans=tuple(spans),
            stream_spans=tuple(stream),
            stream_error=max((anchor.error for anchor in self._anchors), default=0.0),
            messages=tuple(self._peer_messages(to_host)),
            calls=tuple(self._calls()),
            is_truncated=self._is_truncated,
        )

    def _places(
        self, passes: Callable[[int], Sequence[tuple[int, int]]]
    ) -> dict[tuple[int, str, int], tuple[int, int]]:
        """The micro-batch and chunk of each numbered pass of a step."""
        counts: dict[int, int] = defaultdict(int)
        for kept in self._kept:
            if not kept.is_evaluation:
                counts[kept.iteration] = max(counts[kept.iteration], kept.number)
        places = {}
        for iteration, count in counts.items():
            order = passes(count)
            last = max((chunk for _, chunk in order), default=0)
            for number, (micro_batch, chunk) in enumerate(order, start=1):
                for phase in (Phase.FORWARD, Phase.DATA):
                    places[iteration, str(phase), number] = (micro_batch, chunk)
                places[iteration, str(Phase.BACKWARD), number] = (micro_batch, last - chunk)
        return places

    def _stream_clock(self) -> Callable[[Any], float]:
        """Turns a mark of the stream into a time of the host."""
        assert self._marks is not None
        first, last, measure = self._anchors[0], self._anchors[-1], self._marks.milliseconds
        elapsed = measure(first.mark, last.mark) * 1e-3
        rate = (last.time - first.time) / elapsed if elapsed > 0 else 1.0
        return lambda mark: first.time + measure(first.mark, mark) * 1e-3 * rate

    def _peer_messages(self, to_host: Callable[[Any], float] | None) -> Iterator[Message]:
        for is_receive, is_forward, number, at, mark in self._messages:
            # What goes forward comes from the previous stage and goes to the next.
            for peer in self._neighbours[is_forward != is_receive].ranks:
                yield Message(
                    is_receive,
                    is_forward,
                    peer,
                    number,
                    at,
                    None if to_host is None else to_host(mark),
                )

    def _calls(self) -> Iterator[CallSpan]:
        began, wall = self._wall
        entries: Iterable[CallEntry] = tuple(self._recorder.calls)
        for entry in entries:
            begin = began + ((entry.started or entry.created) - wall) * 1e-9
            if begin >= began and entry.completed:
                end = max(begin, began + (entry.completed - wall) * 1e-9)
                yield CallSpan(
                    entry.group,
                    entry.sequence,
                    entry.operation,
                    begin,
                    end,
                    entry.peer,
                    entry.sizes,
                    entry.dtype,
                )


@dataclass
class _Flow:
    """An arrow: from where, to where, by (process, track, nanoseconds)."""

    name: str
    source: tuple[int, int, int]
    target: tuple[int, int, int]


@dataclass
class _Origin:
    """The time that the file counts from, by rank 0's clock."""

    seconds: float

    def nanoseconds(self, trace: RankTrace, time: float) -> int:
        return round((trace.alignment.turned(time) - self.seconds) * 1e9)


def process_of(rank: int) -> int:
    """A rank's process in the file: 0 is the idle process of Perfetto."""
    return rank + 1


def track_of(process: int, track: int) -> int:
    """The number of a process's track in the file, where it is the only one."""
    return process * _TRACKS_OF_A_RANK + track


def chrome_trace(
    traces: Sequence[RankTrace], *, about: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All ranks in Chrome's trace event format. `about` is added to the file's `otherData`."""
    kept = [trace for trace in traces if trace.spans]
    origin = _Origin(
        min((trace.alignment.turned(trace.spans[0].begin) for trace in kept), default=0.0)
    )
    events: list[dict[str, Any]] = []
    flows: list[_Flow] = []
    order = sorted(kept, key=lambda trace: (trace.stage, trace.rank))
    for index, trace in enumerate(order):
        events += _names(trace, index)
        events += _steps(trace, origin)
        events += _spans(trace, trace.spans, HOST_TRACK, origin)
        events += _spans(trace, trace.stream_spans, GPU_TRACK, origin)
    flows += _message_flows(kept, origin)
    flows += _wait_all_flows(kept, origin)
    call_events, call_flows = _call_events(kept, origin)
    events += call_events
    flows += call_flows
    for number, flow in enumerate(flows, start=1):
        events += _arrow(flow, number)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"hetero": {**(about or {}), "ranks": [_about(trace) for trace in traces]}},
    }


def _about(trace: RankTrace) -> dict[str, Any]:
    return {
        "rank": trace.rank,
        "name": trace.name,
        "host": trace.host,
        "stage": trace.stage,
        "mesh": trace.mesh,
        "vendor": trace.vendor,
        "simulated": trace.simulated,
        "clock_offset_s": trace.alignment.before.seconds,
        "clock_drift": trace.alignment.drift,
        "clock_error_s": trace.alignment.error,
        "stream_error_s": trace.stream_error,
        "step_seconds": {str(step.iteration): step.seconds for step in trace.steps},
        "is_truncated": trace.is_truncated,
        "problem": trace.problem,
    }


def _names(trace: RankTrace, index: int) -> Iterator[dict[str, Any]]:
    process = process_of(trace.rank)
    yield _named("process_name", process, 0, name=trace.name)
    yield _named("process_sort_index", process, 0, sort_index=index)
    host = "host" if trace.stream_spans else "main thread"
    yield _named("thread_name", process, HOST_TRACK, name=host)
    yield _named("thread_sort_index", process, HOST_TRACK, sort_index=HOST_TRACK)
    if trace.stream_spans:
        yield _named("thread_name", process, GPU_TRACK, name="GPU compute stream")
        yield _named("thread_sort_index", process, GPU_TRACK, sort_index=GPU_TRACK)


def _named(kind: str, process: int, track: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": track_of(process, track), "args": args}


def _slice(
    name: str, category: str, process: int, track: int, begin: int, end: int, **args: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "pid": process,
        "tid": track_of(process, track),
        "args": args,
    }


def _steps(trace: RankTrace, origin: _Origin) -> Iterator[dict[str, Any]]:
    for step in trace.steps:
        begin, end = (origin.nanoseconds(trace, time) for time in (step.begin, step.end))
        yield _slice(
            f"iteration {step.iteration}",
            "step",
            process_of(trace.rank),
            HOST_TRACK,
            begin,
            end,
            iteration=step.iteration,
            seconds=step.seconds,
        )


def _spans(
    trace: RankTrace, spans: Sequence[Span], track: int, origin: _Origin
) -> Iterator[dict[str, Any]]:
    for span in spans:
        begin, end = (origin.nanoseconds(trace, time) for time in (span.begin, span.end))
        if end <= begin:
            continue
        name, args = span.phase, {"iteration": span.iteration, "evaluation": span.is_evaluation}
        if span.micro_batch >= 0:
            args |= {"micro_batch": span.micro_batch, "chunk": span.chunk}
            name = f"{span.phase} {span.micro_batch}"
        elif span.is_evaluation:
            name = f"{span.phase} (evaluation)"
        yield _slice(name, span.phase, process_of(trace.rank), track, begin, end, **args)


def _arrow(flow: _Flow, number: int) -> Iterator[dict[str, Any]]:
    for kind, (process, track, at) in (("s", flow.source), ("f", flow.target)):
        yield {
            "name": flow.name,
            "cat": "flow",
            "ph": kind,
            "id": number,
            "ts": at / 1000,
            "pid": process,
            "tid": track,
            **({"bp": "e"} if kind == "f" else {}),
        }


def _message_flows(traces: Sequence[RankTrace], origin: _Origin) -> Iterator[_Flow]:
    sent: dict[tuple[int, int, bool, int], tuple[int, int, int]] = {}
    for trace in traces:
        for message in trace.messages:
            if not message.is_receive:
                key = (trace.rank, message.peer, message.is_forward, message.number)
                sent[key] = _place(trace, message, origin)
    for trace in traces:
        for message in trace.messages:
            key = (message.peer, trace.rank, message.is_forward, message.number)
            if message.is_receive and key in sent:
                what = "activations" if message.is_forward else "gradients"
                yield _Flow(f"{what} {message.number}", sent[key], _place(trace, message, origin))


def _place(trace: RankTrace, message: Message, origin: _Origin) -> tuple[int, int, int]:
    """Where an arrow begins or ends: at a time inside the wait for the message."""
    on_stream = message.stream_time is not None
    at = origin.nanoseconds(trace, message.stream_time if on_stream else message.time)  # type: ignore[arg-type]
    process = process_of(trace.rank)
    return process, track_of(process, GPU_TRACK if on_stream else HOST_TRACK), at


def _wait_all_flows(traces: Sequence[RankTrace], origin: _Origin) -> Iterator[_Flow]:
    """From the rank that was last to come to where all wait, to the others.

    One number on every rank: only where all have waited equally often in a step.
    """
    waits: dict[int, list[list[Span]]] = defaultdict(list)
    for trace in traces:
        by_step: dict[int, list[Span]] = defaultdict(list)
        for span in trace.spans:
            if span.phase == Phase.WAIT_ALL and not span.is_evaluation:
                by_step[span.iteration].append(span)
        for iteration, spans in by_step.items():
            waits[iteration].append(spans)
    for iteration, of_ranks in waits.items():
        if len(of_ranks) != len(traces) or len({len(spans) for spans in of_ranks}) != 1:
            continue
        for number, together in enumerate(zip(*of_ranks, strict=True), start=1):
            yield from _release(
                f"all have come, {iteration}.{number}",
                [
                    (track_of(process_of(trace.rank), HOST_TRACK), trace, span)
                    for trace, span in zip(traces, together, strict=True)
                ],
                origin,
            )


def _release(
    name: str, waits: Sequence[tuple[int, RankTrace, Span | CallSpan]], origin: _Origin
) -> Iterator[_Flow]:
    """An arrow to each rank that waited from the one that came last."""
    begins = [origin.nanoseconds(trace, span.begin) for _, trace, span in waits]
    last = begins.index(max(begins))
    track, trace, _ = waits[last]
    # Inside the slices: an arrow belongs to the slice that encloses its time.
    source = (process_of(trace.rank), track, begins[last] + 1)
    for index, (track, trace, span) in enumerate(waits):
        end = origin.nanoseconds(trace, span.end) - 1
        if index != last and end > begins[index]:
            yield _Flow(name, source, (process_of(trace.rank), track, end))


def _call_events(
    traces: Sequence[RankTrace], origin: _Origin
) -> tuple[list[dict[str, Any]], list[_Flow]]:
    """Calls of groups on tracks of their own, and the arrows between those of different ranks."""
    events: list[dict[str, Any]] = []
    collectives: dict[tuple[str, int, str], list[tuple[int, RankTrace, CallSpan]]]
    collectives = defaultdict(list)
    sends: dict[tuple[str, int, int], list[tuple[int, RankTrace, CallSpan]]] = defaultdict(list)
    receives: dict[tuple[str, int, int], list[tuple[int, RankTrace, CallSpan]]]
    receives = defaultdict(list)
    for trace in traces:
        process = process_of(trace.rank)
        lanes: list[float] = []
        for call in sorted(trace.calls, key=lambda call: call.begin):
            lane = _free_lane(lanes, call)
            track = track_of(process, _CALLS + lane)
            begin, end = (origin.nanoseconds(trace, time) for time in (call.begin, call.end))
            events.append(
                _slice(
                    f"{call.operation} {call.sequence}",
                    "call",
                    process,
                    _CALLS + lane,
                    begin,
                    max(begin + 1, end),
                    group=call.group,
                    sequence=call.sequence,
                    **({} if call.peer is None else {"peer": call.peer}),
                    sizes=[list(size) for size in call.sizes],
                    dtype=call.dtype,
                )
            )
            place = (track, trace, call)
            if call.operation == "send" and call.peer is not None:
                sends[call.group, trace.rank, call.peer].append(place)
            elif call.operation == "recv" and call.peer is not None:
                receives[call.group, call.peer, trace.rank].append(place)
            elif call.operation not in ("send", "recv"):
                collectives[call.group, call.sequence, call.operation].append(place)
        for lane in range(len(lanes)):
            label = "calls of groups" + (f", {lane + 1}" if lane else "")
            events.append(_named("thread_name", process, _CALLS + lane, name=label))
            events.append(
                _named("thread_sort_index", process, _CALLS + lane, sort_index=_CALLS + lane)
            )
    flows: list[_Flow] = []
    for (group, sequence, operation), places in collectives.items():
        flows += _release(f"{operation} {sequence} of {group}", places, origin)
    for key, sent in sends.items():
        for (source_track, source, send), (track, trace, receive) in zip(
            sent, receives.get(key, ()), strict=False
        ):
            flows.append(
                _Flow(
                    f"send {send.sequence} of {send.group}",
                    (
                        process_of(source.rank),
                        source_track,
                        origin.nanoseconds(source, send.begin),
                    ),
                    (process_of(trace.rank), track, origin.nanoseconds(trace, receive.end) - 1),
                )
            )
    return events, flows


def _free_lane(lanes: list[float], call: CallSpan) -> int:
    """The first track on which nothing is under way; `lanes` holds when each is free again."""
    for lane, free_at in enumerate(lanes):
        if free_at <= call.begin:
            lanes[lane] = call.end + 1e-9
            return lane
    lanes.append(call.end + 1e-9)
    return len(lanes) - 1


def write_trace(trace: Mapping[str, Any], path: Path) -> None:
    """Write a file that Perfetto opens as it is; complete, or not at all. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with gzip.open(beside, "wt", compresslevel=6, encoding="utf-8") as file:
            json.dump(trace, file, separators=(",", ":"))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def clock_sentence(traces: Sequence[RankTrace]) -> str:
    """How exactly the ranks' clocks are known, for the log."""
    remote = [trace for trace in traces if trace.alignment != SHARED]
    if not remote:
        return "all ranks read one clock"
    worst = max(remote, key=lambda trace: trace.alignment.error)
    return (
        f"clocks are aligned with rank 0's to within {worst.alignment.error * 1e6:.0f} us "
        f"({worst.host}, {worst.alignment.before.seconds:+.6f} s from it)"
    )
