"""A timer around every call of a communicator: whose waits are counted for which neighbour."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from hetero.pipeline.communicator import PipelineCommunicator
from megatron.training.timing.clocks import HostClock
from megatron.training.timing.timed_communicator import TimedCommunicator
from megatron.training.timing.timers import Timers

SHAPE = (2, 1, 4)


class Clock(HostClock):
    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now / 1e3


class Work:
    """A transfer that is waited for 3 ms."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def wait(self) -> None:
        self._clock.now += 3


class Neighbours:
    """Stands in for a communicator: every call takes 5 ms and says which it was."""

    pp_group, config, virtual_pipeline_model_parallel_size = "group", "config", 2

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            self._clock.now += 5
            if arguments[-1] == "overlap":
                keys = (
                    ("send_next", "recv_prev") if "forward" in name else ("send_prev", "recv_next")
                )
                return "received", {key: Work(self._clock) for key in keys}
            return "received"

        return call


@pytest.fixture
def parts() -> SimpleNamespace:
    clock = Clock()
    timers = Timers(level=2, clock=clock)
    inner = Neighbours(clock)
    timers.begin()
    return SimpleNamespace(
        clock=clock, timers=timers, inner=inner, timed=TimedCommunicator(inner, timers)
    )


def _counted(parts: SimpleNamespace) -> tuple[dict[str, float], dict[str, float]]:
    parts.timers.end()
    times = parts.timers.take()
    return (
        {name: round(ms, 6) for name, ms in times.parts.items() if ms > 1e-6},
        {name: round(ms, 6) for name, ms in times.timers.items() if ms > 1e-6},
    )


TIMERS = {
    "recv_forward": "forward-recv",
    "recv_backward": "backward-recv",
    "send_forward": "forward-send",
    "send_backward": "backward-send",
    "send_forward_recv_backward": "forward-send-backward-recv",
    "send_backward_recv_forward": "backward-send-forward-recv",
    "send_forward_recv_forward": "forward-send-forward-recv",
    "send_backward_recv_backward": "backward-send-backward-recv",
    "send_forward_backward_recv_forward_backward": "forward-backward-send-forward-backward-recv",
}
BOTH = "send_forward_backward_recv_forward_backward"


@pytest.mark.parametrize(
    ("call", "arguments", "part"),
    [
        ("recv_forward", (SHAPE, False), "wait prev"),
        ("recv_backward", (SHAPE, False), "wait next"),
        ("send_forward", ("out", False), "wait next"),
        ("send_backward", ("grad", False), "wait prev"),
        ("send_forward_recv_backward", ("out", SHAPE, False), "wait next"),
        ("send_backward_recv_forward", ("grad", SHAPE, False), "wait prev"),
        ("send_forward_recv_forward", ("out", True, SHAPE, False), "wait prev"),
        ("send_forward_recv_forward", ("out", False, SHAPE, False), "wait next"),
        ("send_backward_recv_backward", ("grad", True, SHAPE, False), "wait next"),
        ("send_backward_recv_backward", ("grad", False, SHAPE, False), "wait prev"),
        (BOTH, ("out", "grad", True, False, SHAPE), "wait prev"),
        (BOTH, ("out", "grad", False, True, SHAPE), "wait next"),
        (BOTH, ("out", "grad", True, True, SHAPE), "wait both"),
        # At the ends of the pipeline nobody is waited for.
        ("recv_forward", (SHAPE, True), None),
        ("recv_backward", (SHAPE, True), None),
        ("send_forward", ("out", True), None),
        ("send_backward", ("grad", True), None),
        ("send_forward_recv_backward", ("out", SHAPE, True), None),
        ("send_backward_recv_forward", ("grad", SHAPE, True), None),
    ],
)
def test_a_call_is_passed_on_and_its_time_counted_for_a_neighbour(
    parts: SimpleNamespace, call: str, arguments: tuple[Any, ...], part: str | None
) -> None:
    result = getattr(parts.timed, call)(*arguments)
    assert parts.inner.calls == [(call, *arguments)]
    assert result == (None if call in ("send_forward", "send_backward") else "received")
    found, timers = _counted(parts)
    assert timers == ({TIMERS[call]: 5.0} if part else {})
    assert found == {part or "other": 5.0}


@pytest.mark.parametrize(
    ("call", "key", "part", "timer"),
    [
        ("send_forward_recv_forward", "recv_prev", "wait prev", "forward-recv"),
        ("send_forward_recv_forward", "send_next", "wait next", "forward-send"),
        ("send_backward_recv_backward", "recv_next", "wait next", "backward-recv"),
        ("send_backward_recv_backward", "send_prev", "wait prev", "backward-send"),
    ],
)
def test_what_is_waited_for_later_is_counted_then(
    parts: SimpleNamespace, call: str, key: str, part: str, timer: str
) -> None:
    """Overlapped: the call only posts, and its handles are popped from a dictionary."""
    received, handles = getattr(parts.timed, call)("tensor", True, SHAPE, "overlap")
    handles.pop(key).wait()
    found, timers = _counted(parts)
    assert received == "received"
    assert len(handles) == 1
    assert timers.pop(timer) == 3.0
    assert list(timers.values()) == [5.0]
    assert sum(found.values()) == 8.0
    assert found[part] >= 3.0


def test_it_has_all_that_the_schedules_ask_of_a_communicator(parts: SimpleNamespace) -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(P2PCommunicator) == public(TimedCommunicator)
    # The schedules know nothing of receives that are posted ahead.
    assert public(PipelineCommunicator) - public(P2PCommunicator) == {"expect"}
    for name in ("pp_group", "config", "virtual_pipeline_model_parallel_size"):
        assert getattr(parts.timed, name) == getattr(parts.inner, name)
