"""A rank's spans, and the file that they become: every nanosecond of a step, on the right track."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetero.observe import trace as traced
from hetero.observe.clocks import Alignment, Offset
from hetero.observe.record import CallEntry, Phase, Recorder
from hetero.observe.trace import (
    CallSpan,
    Message,
    Neighbour,
    RankTrace,
    Span,
    SpanRecorder,
    Step,
    chrome_trace,
    write_trace,
)
from tests import perfetto_files

NOBODY = Neighbour()


def one_chunk(count: int) -> list[tuple[int, int]]:
    return [(number, 0) for number in range(count)]


class Ranks:
    """A recorder whose phases last as long as they are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time_ns=time.time_ns, time=time.time)
        monkeypatch.setattr("hetero.observe.record.time", clock)
        monkeypatch.setattr("hetero.observe.record._now", clock.monotonic)
        self.recorder = Recorder()
        self.spans = SpanRecorder(self.recorder, now=lambda: self.now)

    def begin(self, *, previous: Neighbour = NOBODY, following: Neighbour = NOBODY) -> None:
        self.spans.begin(previous, following)

    def step(self, iteration: int, work: Callable[[], None]) -> None:
        self.recorder.begin_iteration(iteration)
        self.spans.begin_step()
        began = self.now
        work()
        self.recorder.set_phase(Phase.OTHER)
        self.spans.end_step(iteration=iteration, seconds=self.now - began)

    def spend(self, phase: str, seconds: float) -> None:
        with self.recorder.during(phase):
            self.now += seconds

    def forward(self, seconds: float) -> None:
        """As megatron-core's timers tell it: the loader is called inside the pass."""
        with self.recorder.during(Phase.FORWARD):
            self.now += 0.001
            self.recorder.micro_batch += 1
            self.spend(Phase.DATA, 0.5)
            self.now += seconds

    def backward(self, seconds: float) -> None:
        self.recorder.gradients += 1
        self.spend(Phase.BACKWARD, seconds)

    def result(self, passes: Callable[[int], list[tuple[int, int]]] = one_chunk) -> RankTrace:
        self.spans.stop()
        return self.spans.result(RankTrace(rank=0, host="a", vendor="amd"), passes)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_the_spans_of_a_step_fill_it_and_name_their_micro_batch(ranks: Ranks) -> None:
    def work() -> None:
        ranks.forward(1.0)
        ranks.spend(Phase.WAIT_NEXT, 0.25)
        ranks.forward(2.0)
        ranks.backward(4.0)
        ranks.backward(8.0)
        ranks.now += 0.125

    ranks.begin()
    ranks.step(7, work)
    ranks.spend(Phase.SAVE, 3.0)
    found = ranks.result()
    (step,) = found.steps
    inside = [span for span in found.spans if step.begin <= span.begin and span.end <= step.end]
    assert sum(span.end - span.begin for span in inside) == pytest.approx(step.seconds)
    named = [(span.phase, span.micro_batch) for span in inside if span.end > span.begin]
    assert named == [
        *((Phase.FORWARD, 0), (Phase.DATA, 0), (Phase.FORWARD, 0), (Phase.WAIT_NEXT, -1)),
        *((Phase.FORWARD, 1), (Phase.DATA, 1), (Phase.FORWARD, 1)),
        *((Phase.BACKWARD, 0), (Phase.BACKWARD, 1), (Phase.OTHER, -1)),
    ]
    after = [span for span in found.spans if span.begin >= step.end and span.end > span.begin]
    assert [(span.phase, span.end - span.begin) for span in after] == [(Phase.SAVE, 3.0)]


def test_passes_of_chunks_are_counted_as_the_schedule_orders_them(ranks: Ranks) -> None:
    def work() -> None:
        for _ in range(4):
            ranks.forward(1.0)
        for _ in range(4):
            ranks.backward(1.0)

    ranks.begin()
    ranks.step(1, work)
    found = ranks.result(lambda count: [(0, 0), (1, 0), (0, 1), (1, 1)][:count])
    places = [
        [(span.micro_batch, span.chunk) for span in found.spans if span.phase == phase]
        for phase in (Phase.DATA, Phase.BACKWARD)
    ]
    assert places == [[(0, 0), (1, 0), (0, 1), (1, 1)], [(0, 1), (1, 1), (0, 0), (1, 0)]]


def test_an_evaluation_between_steps_has_no_micro_batches(ranks: Ranks) -> None:
    def evaluate() -> None:
        ranks.recorder.is_evaluating = True
        ranks.forward(1.0)
        ranks.recorder.is_evaluating = False

    ranks.begin()
    ranks.step(1, lambda: ranks.forward(1.0))
    evaluate()
    passes = [span for span in ranks.result().spans if span.phase == Phase.FORWARD]
    assert [(span.micro_batch, span.is_evaluation) for span in passes] == [
        *((0, False), (0, False)),
        *((-1, True), (-1, True)),
    ]


def test_messages_are_numbered_on_from_those_of_the_link(ranks: Ranks) -> None:
    ranks.begin(previous=Neighbour((3,), sent=10, received=20), following=Neighbour((5, 6)))
    tell = ranks.recorder.on_message
    assert tell is not None
    tell(True, True)
    tell(False, True)
    tell(True, False)
    tell(False, False)
    tell(False, False)
    found = [
        (message.is_receive, message.is_forward, message.peer, message.number)
        for message in ranks.result().messages
    ]
    assert found == [
        (True, True, 3, 21),
        *((False, True, 5, 1), (False, True, 6, 1)),
        *((True, False, 5, 1), (True, False, 6, 1)),
        *((False, False, 3, 11), (False, False, 3, 12)),
    ]


def test_nothing_is_kept_before_and_after(ranks: Ranks) -> None:
    told: list[str] = []
    ranks.recorder.add_span_listener(lambda phase, begin, end: told.append(phase))
    ranks.spend(Phase.FORWARD, 1.0)
    ranks.begin()
    ranks.step(1, lambda: ranks.spend(Phase.OPTIMIZER, 1.0))
    found = ranks.result()
    assert ranks.recorder.on_message is None
    ranks.spend(Phase.BACKWARD, 1.0)
    assert {span.phase for span in found.spans} == {Phase.OTHER, Phase.OPTIMIZER}
    # Whoever listened before has heard all of it.
    assert {Phase.FORWARD, Phase.OPTIMIZER, Phase.BACKWARD} <= set(told)


def test_a_rank_that_does_too_much_says_that_it_kept_a_part(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced, "MOST_SPANS", 5)
    ranks.begin()
    ranks.step(1, lambda: [ranks.spend(Phase.FORWARD, 1.0) for _ in range(9)] and None)
    found = ranks.result()
    assert len(found.spans) == 5
    assert found.is_truncated


def test_calls_of_groups_are_those_since_the_beginning(ranks: Ranks) -> None:
    clock = time.time_ns()
    ranks.recorder.add_call(
        CallEntry("g", 1, "all_reduce", created=clock - 10**10, completed=clock)
    )
    ranks.begin()
    clock = time.time_ns()
    for sequence, ends in ((2, clock + 5 * 10**6), (3, 0)):
        ranks.recorder.add_call(
            CallEntry(
                *("g", sequence, "all_reduce", "float32", ((4, 2),)),
                created=clock,
                started=clock + 10**6,
                completed=ends,
            )
        )
    (call,) = ranks.result().calls
    assert (call.sequence, call.sizes) == (2, ((4, 2),))
    assert call.end - call.begin == pytest.approx(0.004)


class Stream:
    """A GPU's stream, which runs behind the host; its clock starts elsewhere and is a bit fast."""

    RATE = 1.001

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.behind = 0.0

    def mark(self) -> float:
        return self._ranks.now + self.behind

    def wait(self, mark: float) -> None:
        self._ranks.now = max(self._ranks.now, mark)
        self.behind = 0.0

    def milliseconds(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3 * self.RATE


def test_times_of_a_gpu_are_the_hosts_once_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(monkeypatch)
    stream = Stream(ranks)
    ranks.spans = SpanRecorder(ranks.recorder, marks=stream, now=lambda: ranks.now)

    def work() -> None:
        ranks.forward(1.0)
        stream.behind = 2.0  # the forward pass ends on the GPU 2 s after it was enqueued
        ranks.spend(Phase.OPTIMIZER, 1.0)

    ranks.begin()
    ranks.step(1, work)
    found = ranks.result()
    (host,) = [span for span in found.spans if span.phase == Phase.OPTIMIZER]
    (gpu,) = [span for span in found.stream_spans if span.phase == Phase.OPTIMIZER]
    assert gpu.end == pytest.approx(host.end + 2.0, abs=1e-6)
    assert len(found.stream_spans) == len(found.spans)
    for before, after in zip(found.stream_spans, found.stream_spans[1:], strict=False):
        assert before.end == after.begin


# Two ranks on two hosts, of which the second one's clock is 1000 s ahead.
SENT, RECEIVED = 10.5, 11.25
FIRST = RankTrace(
    rank=0,
    host="a",
    stage=0,
    vendor="amd",
    steps=(Step(4, 10.0, 12.0, 2.0),),
    spans=(
        Span(Phase.FORWARD, 10.0, 10.4, 4, 0),
        Span(Phase.WAIT_NEXT, 10.4, 11.0, 4),
        Span(Phase.WAIT_ALL, 11.0, 11.9, 4),
        Span(Phase.OTHER, 11.9, 12.0, 4),
    ),
    messages=(Message(False, True, 1, 33, SENT),),
    calls=(CallSpan("g", 5, "all_reduce", 10.1, 10.9, None, ((2,),), "float32"),),
)
AHEAD = 1000.0
SECOND = RankTrace(
    rank=1,
    host="b",
    stage=1,
    vendor="nvidia",
    simulated=True,
    steps=(Step(4, AHEAD + 10.0, AHEAD + 12.0, 2.0),),
    spans=(
        Span(Phase.WAIT_PREVIOUS, AHEAD + 10.0, AHEAD + 11.3, 4),
        Span(Phase.FORWARD, AHEAD + 11.3, AHEAD + 11.8, 4, 0),
        Span(Phase.WAIT_ALL, AHEAD + 11.8, AHEAD + 11.95, 4),
        Span(Phase.OTHER, AHEAD + 11.95, AHEAD + 12.0, 4),
    ),
    messages=(Message(True, True, 0, 33, AHEAD + RECEIVED),),
    calls=(CallSpan("g", 5, "all_reduce", AHEAD + 10.5, AHEAD + 10.91, None, ((2,),), "float32"),),
    alignment=Alignment(Offset(AHEAD, AHEAD, 1e-4), Offset(AHEAD + 20, AHEAD, 2e-4)),
)


def test_two_ranks_are_one_file_by_one_clock() -> None:
    content = chrome_trace([SECOND, FIRST], about={"stages": 2})
    perfetto_files.require_valid(content)
    events = content["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [FIRST.name, SECOND.name]
    assert names[1] == "rank 1 on b (stage 1, nvidia, simulated)"
    steps = [(e["ts"], e["dur"]) for e in events if e["name"] == "iteration 4"]
    assert steps == [(0.0, 2e6), (0.0, 2e6)]
    (about,) = [r for r in content["otherData"]["hetero"]["ranks"] if r["rank"] == 1]
    assert about["clock_error_s"] == 2e-4


def arrow(name: str) -> list[tuple[int, float]]:
    """Where the arrow of that name begins and ends: its process, and microseconds."""
    events = chrome_trace([FIRST, SECOND])["traceEvents"]
    return [(e["pid"], e["ts"]) for e in events if e["name"] == name and e["ph"] in "sf"]


def test_arrows_join_what_has_one_number_on_both_ends() -> None:
    assert arrow("activations 33") == [(1, 0.5e6), (2, 1.25e6)]
    # From the rank that came last, to the one that waited for it.
    assert arrow("all have come, 4.1") == [(2, 1.8e6 + 0.001), (1, 1.9e6 - 0.001)]
    assert arrow("all_reduce 5 of g") == [(2, 0.5e6 + 0.001), (1, 0.9e6 - 0.001)]


def test_a_message_whose_other_end_is_unknown_has_no_arrow() -> None:
    other = replace(FIRST, messages=(replace(FIRST.messages[0], number=34),))
    events = chrome_trace([other, SECOND])["traceEvents"]
    assert not [e for e in events if e["name"].startswith("activations")]


def test_calls_that_overlap_are_on_tracks_of_their_own() -> None:
    calls = tuple(
        CallSpan("g", number, "send", 10 + 0.1 * number, 11 + 0.1 * number, 1) for number in (1, 2)
    )
    content = chrome_trace([replace(FIRST, calls=calls), SECOND])
    perfetto_files.require_valid(content)
    sends = [e["tid"] for e in content["traceEvents"] if e["name"] in ("send 1", "send 2")]
    assert len(set(sends)) == 2


def test_a_rank_travels_as_json() -> None:
    for rank in (FIRST, SECOND):
        assert RankTrace.from_json(rank.to_json()) == rank


def test_the_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    write_trace(chrome_trace([FIRST, SECOND]), path)
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    with pytest.raises(TypeError):
        write_trace({"traceEvents": [object()]}, path)
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_perfetto_reads_it(tmp_path: Path) -> None:
    if (reason := perfetto_files.why_missing()) is not None:
        pytest.skip(reason)
    path = tmp_path / "trace.json.gz"
    write_trace(chrome_trace([FIRST, SECOND]), path)
    errors, slices, flows = perfetto_files.queried(
        path,
        "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
        "select process.name as rank, slice.name as name, ts, dur from slice "
        "join thread_track on slice.track_id = thread_track.id join thread using (utid) "
        "join process using (upid) where slice.name = 'forward 0' order by ts",
        "select count() as count from flow",
    )
    assert not errors
    assert [(row["rank"], row["dur"]) for row in slices] == [
        (FIRST.name, 400_000_000),
        (SECOND.name, 500_000_000),
    ]
    assert slices[1]["ts"] - slices[0]["ts"] == 1_300_000_000
    assert flows == [{"count": 3}]
