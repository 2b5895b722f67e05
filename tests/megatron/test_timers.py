"""What an iteration's time is given to, by a clock that only the test moves."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.hetero.timers import (
    NO_TIMER,
    PARTS,
    TIMERS,
    HostClock,
    StreamClock,
    Timers,
    Times,
    clock_of,
)


class Device:
    """A clock whose marks pass when the test says so, as a GPU's events do."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done = float("inf")
        """Marks up to here have passed."""
        self.waited: list[float] = []
        self.marked = 0

    def mark(self) -> float:
        self.marked += 1
        return self.now

    def milliseconds(self, begin: float, end: float) -> float:
        assert self.passed(end), "times were asked for before they were known"
        return end - begin

    def passed(self, mark: float) -> bool:
        return mark <= self.done

    def wait(self, mark: float) -> None:
        self.waited.append(mark)
        self.done = max(self.done, mark)

    def release(self, marks: Iterable[float]) -> None:
        pass


@pytest.fixture
def device() -> Device:
    return Device()


def _spend(timers: Timers, device: Device, name: str, ms: float, **how: Any) -> None:
    """As megatron-core does: by name and level to start, by name alone to stop."""
    timers(name, log_level=TIMERS[name][0], **how).start(barrier=True)
    device.now += ms
    timers(name).stop()


def _iteration(timers: Timers, device: Device) -> None:
    timers.begin()
    device.now += 1
    timers("forward-backward", log_level=1).start(barrier=True)
    _spend(timers, device, "forward-recv", 5)
    timers("forward-compute", log_level=2).start()
    with timers("batch-generator"):
        device.now += 2
    device.now += 10
    timers("forward-compute").stop()
    device.now += 3
    _spend(timers, device, "backward-compute", 20)
    _spend(timers, device, "all-grads-sync", 4)
    timers("forward-backward").stop()
    with timers("optimizer"):
        device.now += 1
        with timers("grad-norm-all-gather"):
            device.now += 7
        _spend(timers, device, "optimizer-inner-step", 6)
    device.now += 2
    timers.end()


EVERY_LEVEL = {"grad sync": 4, "wait all": 7, "optimizer": 7}


def _counted(times: dict[str, float]) -> dict[str, float]:
    return {name: ms for name, ms in times.items() if ms}


def test_each_stretch_of_time_belongs_to_the_innermost_timer(device: Device) -> None:
    timers = Timers(level=2, clock=device)
    _iteration(timers, device)
    times = timers.take()
    parts = {"wait prev": 5, "forward": 10, "data": 2, "backward": 20, "other": 6}
    assert _counted(times.parts) == EVERY_LEVEL | parts
    assert times.whole == sum(times.parts.values()) == 61
    whole = times.timers  # as in Megatron
    assert (whole["forward-backward"], whole["forward-compute"], whole["optimizer"]) == (44, 12, 14)


def test_lower_levels_time_what_comes_once_in_an_iteration_and_nothing(device: Device) -> None:
    timers = Timers(level=1, clock=device)
    _iteration(timers, device)
    assert _counted(timers.take().parts) == EVERY_LEVEL | {"forward-backward": 40, "other": 3}
    device.marked = 0
    timers = Timers(level=0, clock=device)
    _iteration(timers, device)
    timers.count_completed()
    assert device.marked == 0
    assert timers.take() == Times()


def test_neither_evaluation_nor_a_name_that_is_not_known_is_timed(device: Device) -> None:
    timers = Timers(level=2, clock=device)
    with timers("forward-compute", log_level=2):  # outside of an iteration
        pass
    _spend(timers, device, "forward-compute", 5)
    assert device.marked == 0
    timers.begin()
    assert timers("conditional-embedder-grads-all-reduce", log_level=1) is NO_TIMER
    timers.end()


def test_times_of_several_iterations_are_sums_and_travel_as_a_row_of_numbers(
    device: Device,
) -> None:
    timers = Timers(level=2, clock=device)
    for _ in range(3):
        _iteration(timers, device)
    times = timers.take()
    assert (times.iterations, times.whole, times.parts["backward"]) == (3, 183, 60)
    assert timers.take() == Times()
    row = torch.tensor(times.as_row(), dtype=torch.float64).tolist()
    assert len(row) == 2 + len(PARTS) + len(TIMERS)
    assert Times.from_row(row) == times


def test_nothing_is_waited_for_until_the_times_are_asked_for(device: Device) -> None:
    """What a GPU has not done yet is left for later, and what it has done is counted."""
    device.done = -1.0
    timers = Timers(level=2, clock=device)
    _iteration(timers, device)
    first_end = device.now
    timers.count_completed()
    assert device.waited == []
    device.done = first_end
    _iteration(timers, device)
    timers.count_completed()
    assert device.waited == []
    assert timers.take().iterations == 2
    assert device.waited == [device.now]


@pytest.mark.parametrize("stopped", ["forward-backward", "backward-compute"])
def test_a_timer_that_is_stopped_out_of_order_is_an_error(device: Device, stopped: str) -> None:
    timers = Timers(level=2, clock=device)
    timers.begin()
    timers("forward-backward").start()
    timers("forward-compute").start()
    timers(stopped).stop()
    timers.end()
    with pytest.raises(RuntimeError, match="not the last one started"):
        timers.take()


def test_a_timer_that_is_left_running_is_an_error(device: Device) -> None:
    timers = Timers(level=2, clock=device)
    timers.begin()
    timers("optimizer").start()
    timers.end()
    with pytest.raises(RuntimeError, match="timer optimizer was not stopped"):
        timers.take()


NESTED = st.recursive(
    st.floats(0, 1e3),
    lambda inner: st.tuples(st.sampled_from(sorted(TIMERS)), st.lists(inner, max_size=4)),
    max_leaves=30,
)


@given(st.lists(NESTED, max_size=6), st.sampled_from([1, 2]))
def test_parts_are_never_negative_and_add_up_to_the_iteration(work: list[Any], level: int) -> None:
    device = Device()
    timers = Timers(level=level, clock=device)

    def do(items: list[Any]) -> None:
        for item in items:
            if isinstance(item, float):
                device.now += item
            else:
                name, inner = item
                with timers(name):
                    do(inner)

    timers.begin()
    do(work)
    timers.end()
    times = timers.take()
    assert all(ms >= 0 for ms in times.parts.values())
    assert sum(times.parts.values()) == pytest.approx(times.whole)
    assert times.whole == device.now


def test_the_host_measures_where_the_host_computes() -> None:
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    begin, end = clock.mark(), clock.mark()
    assert clock.passed(end)
    assert clock.milliseconds(begin, end) == (end - begin) * 1e3 >= 0
    assert clock.milliseconds(begin, begin + 2) == pytest.approx(2000)


def test_a_gpu_measures_with_events_that_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event is asked for its time, and none is waited for, before the iteration is over."""
    calls: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.at: float | None = None
            calls.append("new")

        def record(self) -> None:
            self.at = float(len(calls))
            calls.append("record")

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            calls.append("synchronize")

        def elapsed_time(self, end: Any) -> float:
            calls.append("elapsed")
            return float(end.at - self.at)

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Event=Event))
    clock = clock_of(torch.device("cuda", 0))
    assert isinstance(clock, StreamClock)
    timers = Timers(level=2, clock=clock)

    def iterate() -> None:
        timers.begin()
        with timers("forward-compute"):
            pass
        timers.end()

    iterate()
    assert calls == ["new", "record"] * 4
    timers.count_completed()
    assert "synchronize" not in calls
    del calls[:]
    iterate()
    assert calls == ["record"] * 4
    assert timers.take().iterations == 2
    assert calls.count("synchronize") == 1
