"""What rank 0 tells of a run that goes on: slow ranks, and clocks that were set."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from hetero.observe import record as record_module
from hetero.observe.blame import Surroundings
from hetero.observe.collect import Collector
from hetero.observe.record import THROTTLED, Phase, Recorder, Snapshot
from hetero.observe.watch import StallWatch

AROUND = Surroundings(
    names={rank: f"rank {rank} on b (stage 1, nvidia)" for rank in range(3)},
    peers={1: (2,), 2: (1,)},
)


class Unasked:
    """Liveness, of which nothing is wanted here."""

    def on_answer(self, handle) -> None:
        pass


@pytest.fixture
def collector() -> Collector:
    return Collector(Recorder())


def watch(collector: Collector, told: list[str]) -> StallWatch:
    """One that looks only when it is asked to."""
    made = StallWatch(collector, Unasked(), surroundings=AROUND, warn_after=60.0, tell=told.append)
    made.close()
    return made


def passes(collector: Collector, *, steps: int, seconds: dict[int, float]) -> None:
    """All have made so many steps, with so many seconds of passes in each."""
    for rank, one in seconds.items():
        spent = {Phase.FORWARD: one * steps, Phase.OTHER: 10.0}
        made = Snapshot(rank=rank, pid=1, host="b", iteration=steps, phase_seconds=spent)
        collector.add(rank, made.to_json())


def test_a_rank_whose_passes_take_1_3_times_its_peers_is_told_once(collector) -> None:
    told: list[str] = []
    made = watch(collector, told)
    for steps in (1, 10, 20):
        passes(collector, steps=steps, seconds={1: 1.3, 2: 1.0})
        made._look_for_slow_ranks()
    (line,) = told
    assert line.startswith("warning: rank 1 on b (stage 1, nvidia) computes slower than its peers")
    assert "1.30 times theirs" in line


def test_a_rank_that_is_slow_for_a_moment_is_not_told(collector) -> None:
    told: list[str] = []
    made = watch(collector, told)
    spent = 0.0
    for steps, seconds in ((1, 1.0), (11, 1.3), (21, 1.0), (31, 1.3)):
        spent += 10 * seconds
        for rank, one in ((1, spent / steps), (2, 10.0 * (1 + steps // 10) / steps)):
            passes(collector, steps=steps, seconds={rank: one})
        made._look_for_slow_ranks()
    assert told == []


def test_slow_steps_are_counted_over_several_looks_until_they_are_enough(collector) -> None:
    told: list[str] = []
    made = watch(collector, told)
    for steps in range(1, 13):
        assert told == [] or steps > 11
        passes(collector, steps=steps, seconds={1: 1.3, 2: 1.0})
        made._look_for_slow_ranks()
    assert len(told) == 1


def test_a_clock_that_is_set_back_is_told_once_of_each_host(collector, monkeypatch) -> None:
    told: list[str] = []
    watch(collector, told)
    ranks = [Recorder() for _ in range(2)]
    for rank, recorder in enumerate(ranks, start=1):
        recorder.rank, recorder.host = rank, "b"
    real = time.time
    monkeypatch.setattr(record_module.time, "time", lambda: real() - 3600)
    for recorder in ranks:
        collector.add(recorder.rank, recorder.snapshot().to_json())
        collector.add(recorder.rank, replace(recorder.snapshot(), seconds=2.0).to_json())
    (line,) = told
    assert line.startswith(
        "warning: the clock of rank 1 on b (stage 1, nvidia) was set back by 3600 s"
    )


def test_rank_0_tells_of_its_own_clock_at_the_next_look(collector, monkeypatch) -> None:
    told: list[str] = []
    made = watch(collector, told)
    made._look()
    real = time.time
    monkeypatch.setattr(record_module.time, "time", lambda: real() + 90)
    made._look()
    (line,) = told
    assert "the clock of rank 0 on b (stage 1, nvidia) was set forward by 90 s" in line


def test_a_call_under_way_is_as_old_as_it_is_whatever_the_clock_says(monkeypatch) -> None:
    recorder = Recorder()
    recorder.add_call(record_module.CallEntry("g", 1, "all_reduce"))
    real = time.time_ns
    monkeypatch.setattr(record_module.time, "time_ns", lambda: real() + 3600 * 10**9)
    (call,) = recorder.snapshot().calls
    assert call.seconds < 60


def test_a_slow_rail_is_told_once_with_the_names_of_both_its_ends(collector) -> None:
    told: list[str] = []
    watch(collector, told)
    for number, (rank, rail) in enumerate([(1, "10.1 to 10.2"), (0, "10.2 to 10.1")] * 2):
        text = f"tcp {rank}-{1 - rank}: rail {rail} is slow: it carries 1 MB/s"
        incident = {"kind": "rail slow", "rank": rank, "peer": 1 - rank, "rail": rail, "text": text}
        collector.add_incidents([incident | {"number": number}])
    assert told == [
        "warning: between rank 1 on b (stage 1, nvidia) and rank 0 on b (stage 1, nvidia): rail "
        "10.1 to 10.2 is slow: it carries 1 MB/s"
    ]


def test_a_rail_that_is_lost_again_after_it_came_back_is_told_again(collector) -> None:
    told: list[str] = []
    watch(collector, told)
    kinds = ["rail lost", "rail lost", "rail back", "rail lost"]
    for number, kind in enumerate(kinds):
        text = "tcp 0-1: rail 10.1 to 10.2 changed"
        incident = {"kind": kind, "rank": 0, "peer": 1, "rail": "10.1 to 10.2", "text": text}
        collector.add_incidents([incident | {"number": number}])
    assert len(told) == 2


def test_a_gpu_that_is_throttled_is_told_once_with_its_rank(collector) -> None:
    told: list[str] = []
    watch(collector, told)
    for number in (1, 2):
        incident = {"rank": 1, "number": number, "kind": THROTTLED, "text": "its GPU is hot"}
        collector.add_incidents([incident])
    assert told == ["warning: rank 1 on b (stage 1, nvidia): its GPU is hot; see its cooling"]
