"""The record of a process: what it says of its phases, waits, calls, links and incidents."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.observe.record import (
    RECORDED_CALLS,
    CallEntry,
    CallState,
    LinkState,
    Phase,
    ProcessState,
    RailState,
    Recorder,
    Snapshot,
    Wait,
)

LARGEST = 48 << 10


class Clock:
    """`time.monotonic` that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    monkeypatch.setattr("hetero.observe.record._now", made)
    return made


class Blocked:
    """What a thread waits for."""

    def __init__(self, what: str, *peers: int) -> None:
        self.what, self.peers = what, peers

    def as_wait(self, seconds: float) -> Wait:
        return Wait(what=self.what, seconds=seconds, peers=self.peers)


class Carried:
    """A link, of which the recorder asks the state."""

    def __init__(self, state: LinkState | None) -> None:
        self.kept = state

    def state(self) -> LinkState | None:
        return self.kept


def test_phases_nest_and_their_times_add_up_to_the_whole(clock: Clock) -> None:
    recorder = Recorder()
    begun = clock.now
    for seconds, change in (
        (1.0, lambda: recorder.begin_iteration(1)),
        (2.0, lambda: recorder.enter(Phase.FORWARD_BACKWARD)),
        (4.0, lambda: recorder.enter(Phase.FORWARD)),
        (8.0, recorder.leave),
        (16.0, recorder.leave),
        (32.0, lambda: recorder.enter(Phase.OPTIMIZER)),
    ):
        clock.now += seconds
        change()
    clock.now += 64.0
    seen = recorder.snapshot()
    assert seen.phase_seconds == {
        "start": 1.0,
        "other": 2.0 + 32.0,
        "forward-backward": 4.0 + 16.0,
        "forward": 8.0,
        "optimizer": 64.0,
    }
    assert sum(seen.phase_seconds.values()) == clock.now - begun
    assert (seen.phase, seen.seconds) == ("optimizer", 64.0)


def test_a_phase_that_turns_out_to_be_another_counts_as_that_from_its_begin(clock: Clock) -> None:
    recorder = Recorder()
    recorder.enter(Phase.WAIT_PREVIOUS)
    clock.now += 3.0
    recorder.rename(Phase.WAIT_NEXT)
    recorder.leave()
    assert recorder.snapshot().phase_seconds == {"wait next": 3.0}


def test_an_error_inside_a_phase_leaves_it(clock: Clock) -> None:
    recorder = Recorder()
    recorder.set_phase(Phase.OTHER)
    with pytest.raises(OSError), recorder.during(Phase.SAVE):
        raise OSError
    assert recorder.phase == Phase.OTHER


def test_listeners_hear_of_every_span_and_no_two_overlap(clock: Clock) -> None:
    recorder = Recorder()
    heard: list[tuple[str, float, float]] = []
    more: list[str] = []

    def listener(phase: str, begin: float, end: float) -> None:
        heard.append((phase, begin, end))

    recorder.begin_iteration(1)
    recorder.add_span_listener(listener)
    recorder.add_span_listener(lambda phase, *_: more.append(phase))
    begun = clock.now
    for change in (
        lambda: recorder.enter(Phase.FORWARD_BACKWARD),
        lambda: recorder.enter(Phase.FORWARD),
        recorder.leave,
        recorder.leave,
    ):
        clock.now += 1.0
        change()
    recorder.remove_span_listener(listener)
    recorder.set_phase(Phase.SAVE)
    assert [phase for phase, _, _ in heard] == [
        "other",
        "forward-backward",
        "forward",
        "forward-backward",
    ]
    assert [(begin, end) for _, begin, end in heard] == [
        (begun + step, begun + step + 1.0) for step in range(4)
    ]
    assert len(more) == len(heard) + 1


def test_the_oldest_wait_of_any_thread_comes_first_and_is_gone_when_it_ends(clock: Clock) -> None:
    recorder = Recorder()
    began, may_end = threading.Event(), threading.Event()

    def wait_long() -> None:
        recorder.begin_wait(Blocked("receive message 12 from rank 1", 1))
        began.set()
        assert may_end.wait(60)
        recorder.end_wait()

    with ThreadPoolExecutor() as pool:
        other = pool.submit(wait_long)
        assert began.wait(60)
        clock.now += 5.0
        recorder.begin_wait(Blocked("all-reduce 3", 2, 3))
        clock.now += 2.0
        seen = recorder.snapshot()
        recorder.end_wait()
        assert [(wait.what, wait.seconds, wait.peers) for wait in seen.waits] == [
            ("receive message 12 from rank 1", 7.0, (1,)),
            ("all-reduce 3", 2.0, (2, 3)),
        ]
        assert seen.is_waiting
        may_end.set()
        other.result(60)
    assert recorder.snapshot().waits == ()


def entry(sequence: int, *, completed: bool = True) -> CallEntry:
    now = time.time_ns()
    return CallEntry(
        group="data",
        sequence=sequence,
        operation="all_reduce",
        sizes=((8, 1024),),
        completed=now if completed else 0,
    )


def test_calls_that_are_under_way_are_shown_and_else_the_last_one() -> None:
    recorder = Recorder()
    for sequence in range(1, 5):
        recorder.add_call(entry(sequence))
    (last,) = recorder.snapshot().calls
    assert (last.sequence, last.state) == (4, "completed")
    for sequence in range(5, 8):
        recorder.add_call(entry(sequence, completed=sequence == 6))
    seen = recorder.snapshot().calls
    assert [(call.sequence, call.state) for call in seen] == [(5, "scheduled"), (7, "scheduled")]


def test_a_closed_link_and_one_that_is_gone_are_left_out() -> None:
    recorder = Recorder()
    kept, closed = Carried(LinkState(peer=1, bytes_sent=7)), Carried(None)
    gone = Carried(LinkState(peer=2))
    for link in (kept, closed, gone):
        recorder.add_link(link)
    del gone, link
    assert [(link.peer, link.bytes_sent) for link in recorder.snapshot().links] == [(1, 7)]


def test_2000_calls_and_100_links_of_32_rails_make_a_snapshot_that_liveness_takes() -> None:
    recorder = Recorder()
    for sequence in range(2 * RECORDED_CALLS):
        recorder.add_call(entry(sequence, completed=False))
    assert len(recorder.calls) == RECORDED_CALLS
    rails = tuple(
        RailState(name=f"10.77.{n}.1 to 10.77.{n}.2", bytes_sent=2**60, bytes_per_second=1e11)
        for n in range(32)
    )
    links = [
        Carried(
            LinkState(
                peer=peer, transport="cpu-forward", bytes_sent=2**60, oldest="receive", rails=rails
            )
        )
        for peer in range(100)
    ]
    for link in links:
        recorder.add_link(link)
    for _ in range(200):
        recorder.add_incident("rail lost", "x" * 10_000, rail=0)
    line = recorder.snapshot().to_json()
    assert len(line) <= LARGEST
    seen = Snapshot.from_json(line)
    assert seen.links
    assert {len(link.rails) for link in seen.links} == {8}


def test_a_snapshot_that_would_be_larger_leaves_its_details_out() -> None:
    recorder = Recorder()
    recorder.begin_iteration(7)
    recorder.values = {f"a value {n}": 1.0 for n in range(10_000)}
    line = recorder.snapshot().to_json()
    assert len(line) <= LARGEST
    assert Snapshot.from_json(line).iteration == 7


def test_every_incident_is_sent_once_and_kept() -> None:
    recorder = Recorder()
    recorder.begin_iteration(3)
    before = time.time()
    for count in range(40):
        recorder.add_incident("skipped", f"number {count}", loss=None)
    sent = [incident for _ in range(4) for incident in recorder.snapshot().incidents]
    assert [incident["text"] for incident in sent] == [f"number {n}" for n in range(40)]
    assert [incident["number"] for incident in sent] == list(range(1, 41))
    assert recorder.incidents() == sent
    assert recorder.incidents(most=2) == sent[-2:]
    first = sent[0]
    assert before <= first["time"] <= time.time()
    assert (first["kind"], first["rank"], first["iteration"]) == ("skipped", recorder.rank, 3)
    assert first["loss"] is None


def test_a_forked_child_has_none_of_its_parents_calls_links_waits_and_listeners() -> None:
    recorder = Recorder()
    link = Carried(LinkState(peer=1))
    recorder.add_link(link)
    recorder.add_call(entry(1))
    recorder.add_span_listener(lambda *_: os._exit(3))
    recorder.begin_wait(Blocked("something"))
    child = os.fork()
    if child == 0:
        recorder.set_phase(Phase.DATA)
        seen = recorder.snapshot()
        os._exit(0 if (seen.calls, seen.links, seen.waits) == ((), (), ()) else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(recorder.snapshot().links) == 1


def test_threads_that_record_at_once_lose_nothing_and_end_no_snapshot() -> None:
    recorder = Recorder()
    stop = threading.Event()
    each = 3000

    def record() -> None:
        for sequence in range(each):
            recorder.begin_wait(Blocked("a call"))
            recorder.add_call(entry(sequence))
            recorder.end_wait()
            if sequence % 100 == 0:
                recorder.add_incident("skipped", "x")

    def look() -> int:
        count = 0
        while not stop.is_set():
            Snapshot.from_json(recorder.snapshot().to_json())
            count += 1
        return count

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor() as pool:
            looking = pool.submit(look)
            for recording in [pool.submit(record) for _ in range(3)]:
                recording.result(60)
            stop.set()
            assert looking.result(60) > 0
    finally:
        sys.setswitchinterval(interval)
    assert len(recorder.calls) == RECORDED_CALLS
    numbers = [incident["number"] for incident in recorder.incidents()]
    assert sorted(numbers) == list(range(1, 3 * each // 100 + 1))


def test_the_kernels_counters_are_those_of_this_process() -> None:
    recorder = Recorder()
    recorder.snapshot()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    seen = recorder.snapshot().process
    assert seen.main_thread == "R"
    assert seen.cpu > 0.0
    assert seen.resident_bytes > 1 << 20


def test_a_record_without_a_loop_names_its_process_and_host() -> None:
    recorder = Recorder()
    seen = recorder.snapshot()
    assert (seen.pid, seen.host) == (os.getpid(), os.uname().nodename)
    assert (seen.iteration, seen.phase) == (0, "start")


TEXT = st.text(max_size=30)
COUNT = st.integers(0, 2**63)
SECONDS = st.floats(0, 1e9, allow_nan=False)
SIZES = st.lists(st.lists(COUNT, max_size=3).map(tuple), max_size=3).map(tuple)


def tuples(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(strategy, max_size=3).map(tuple)


RAILS = st.builds(
    RailState,
    name=TEXT,
    bytes_sent=COUNT,
    state=st.sampled_from(["up", "slow", "lost"]),
    bytes_per_second=SECONDS,
)
LINKS = st.builds(
    LinkState,
    peer=COUNT,
    transport=TEXT,
    is_boundary=st.booleans(),
    bytes_sent=COUNT,
    wait_seconds=SECONDS,
    queued=COUNT,
    oldest=TEXT,
    retransmitted=COUNT,
    rails=tuples(RAILS),
)
CALLS = st.builds(
    CallState,
    group=TEXT,
    sequence=COUNT,
    operation=TEXT,
    state=TEXT,
    seconds=SECONDS,
    peer=st.none() | COUNT,
    sizes=SIZES,
)
WAITS = st.builds(
    Wait,
    what=TEXT,
    seconds=SECONDS,
    peers=st.lists(COUNT, max_size=4).map(tuple),
    group=TEXT,
    sequence=COUNT,
)
INCIDENTS = st.fixed_dictionaries(
    {"time": SECONDS, "rank": COUNT, "number": COUNT, "kind": TEXT, "text": TEXT},
    optional={"loss": st.none() | SECONDS, "ranks": st.lists(COUNT, max_size=3)},
)
SNAPSHOTS = st.builds(
    Snapshot,
    rank=COUNT,
    pid=COUNT,
    host=TEXT,
    phase=st.sampled_from([str(phase) for phase in Phase]),
    frame=TEXT,
    seconds=SECONDS,
    iteration=COUNT,
    is_evaluating=st.booleans(),
    micro_batch=COUNT,
    gradients=COUNT,
    tokens=COUNT,
    iteration_seconds=SECONDS,
    data_wait_seconds=SECONDS,
    memory_bytes=COUNT,
    phase_seconds=st.dictionaries(TEXT, SECONDS, max_size=4),
    waits=tuples(WAITS),
    calls=tuples(CALLS),
    links=tuples(LINKS),
    process=st.builds(
        ProcessState,
        main_thread=TEXT,
        cpu=SECONDS,
        major_faults=SECONDS,
        resident_bytes=COUNT,
    ),
    values=st.dictionaries(TEXT, SECONDS, max_size=4),
    incidents=tuples(INCIDENTS),
)


@given(SNAPSHOTS)
def test_a_snapshot_is_the_same_after_its_way_as_json_in_one_line(snapshot: Snapshot) -> None:
    line = snapshot.to_json()
    assert b"\n" not in line
    assert Snapshot.from_json(line) == snapshot


def test_the_strategy_above_knows_every_field() -> None:
    """So that a new field is not left out of the round trip."""
    made = SNAPSHOTS.wrapped_strategy if hasattr(SNAPSHOTS, "wrapped_strategy") else SNAPSHOTS
    assert set(made.kwargs) == {field.name for field in fields(Snapshot)}


def without(name: str) -> Callable[[dict], None]:
    return lambda values: values.pop(name)


def with_more(values: dict) -> None:
    values["unknown"] = 1


@pytest.mark.parametrize("change", [without("rank"), without("links"), with_more])
def test_a_record_of_another_version_is_refused(change: Callable[[dict], None]) -> None:
    values = json.loads(Recorder().snapshot().to_json())
    change(values)
    with pytest.raises((KeyError, TypeError)):
        Snapshot.from_json(json.dumps(values).encode())


def test_a_wait_whose_subject_is_gone_by_the_time_it_is_asked_is_shown_as_it_was() -> None:
    """The subject is asked in another thread, at any time before `end_wait`."""
    recorder = Recorder()
    subject = SimpleNamespace(as_wait=lambda seconds: Wait(what="a message", seconds=seconds))
    recorder.begin_wait(subject)
    del subject
    assert recorder.snapshot().waits[0].what == "a message"
    recorder.end_wait()
    recorder.end_wait()
    assert recorder.snapshot().waits == ()
