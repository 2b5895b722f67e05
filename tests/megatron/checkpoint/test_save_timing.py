"""What a save cost: the time of every moment for which it kept training waiting, and no other."""

from __future__ import annotations

import pytest

from megatron.hetero.checkpoint.save_timing import SaveTimings


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def costs(clock: Clock) -> SaveTimings:
    return SaveTimings(clock)


def stand_still(costs: SaveTimings, clock: Clock, seconds: float) -> None:
    with costs.blocking():
        clock.now += seconds


def test_each_save_has_its_own_time_and_the_run_their_sum(costs: SaveTimings, clock: Clock) -> None:
    stand_still(costs, clock, 3.0)  # of no save
    assert costs.as_json() == {"saving_seconds": 0.0, "saves": []}
    costs.begin(6)
    stand_still(costs, clock, 1.5)
    clock.now += 40.0
    stand_still(costs, clock, 0.25)
    costs.end(memory_wait_s=1.0, written_s=8.0, bytes=640)
    costs.begin(12)
    stand_still(costs, clock, 0.5)
    costs.end(memory_wait_s=0.0, written_s=7.0, bytes=641)

    names = ("iteration", "stood_still_s", "memory_wait_s", "written_s", "bytes")
    saves = [(6, 1.75, 1.0, 8.0, 640), (12, 0.5, 0.0, 7.0, 641)]
    assert costs.as_json() == {
        "saving_seconds": 2.25,
        "saves": [dict(zip(names, save, strict=True)) for save in saves],
    }


def test_a_save_that_failed_cost_time_too(costs: SaveTimings, clock: Clock) -> None:
    def fail() -> None:
        with costs.blocking():
            clock.now += 2.0
            raise OSError("full")

    costs.begin(6)
    with pytest.raises(OSError, match="full"):
        fail()
    cost = costs.end(memory_wait_s=0.0, written_s=None, bytes=None)
    assert (cost.stood_still_s, cost.written_s, cost.bytes) == (2.0, None, None)
    assert costs.total_s == 2.0
    with pytest.raises(RuntimeError, match="had not begun"):
        costs.end(memory_wait_s=0.0, written_s=1.0, bytes=1)
