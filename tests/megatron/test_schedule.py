"""megatron-core's timers around the calls of a communicator: whose waits are counted for whom."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron.hetero.schedule import time_by_neighbour
from megatron.hetero.timers import HostClock, Timers

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


class Stage(P2PCommunicator):
    """megatron-core's communicator, whose every transfer takes 5 ms."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.timers = Timers(level=2, clock=self.clock)
        self.config = SimpleNamespace(timers=self.timers)
        time_by_neighbour(self, self.timers)
        self.timers.begin()

    def _communicate(self, *, wait_on_reqs: bool = True, **call: Any) -> Any:
        self.clock.now += 5
        posted = {key: Work(self.clock) for key in ("recv_prev", "recv_next") if call[key]}
        sent = [key for key in ("send_prev", "send_next") if call[f"tensor_{key}"] is not None]
        posted |= {key: Work(self.clock) for key in sent}
        return "from prev", "from next", None if wait_on_reqs else posted

    def counted(self) -> tuple[dict[str, float], dict[str, float]]:
        """Milliseconds by part and by timer."""
        self.timers.end()
        times = self.timers.take()
        return (
            {name: round(ms, 6) for name, ms in times.parts.items() if ms > 1e-6},
            {name: round(ms, 6) for name, ms in times.timers.items() if ms > 1e-6},
        )


BOTH = "send_forward_backward_recv_forward_backward"


@pytest.mark.parametrize(
    ("call", "arguments", "part", "timer"),
    [
        ("recv_forward", (SHAPE, False), "prev", "forward-recv"),
        ("recv_backward", (SHAPE, False), "next", "backward-recv"),
        ("send_forward", ("out", False), "next", "forward-send"),
        ("send_backward", ("grad", False), "prev", "backward-send"),
        ("send_forward_recv_backward", ("out", SHAPE, False), "next", "forward-send-backward-recv"),
        (
            *("send_backward_recv_forward", ("grad", SHAPE, False)),
            *("prev", "backward-send-forward-recv"),
        ),
        ("send_forward_recv_forward", ("out", True, SHAPE), "prev", "forward-send-forward-recv"),
        ("send_forward_recv_forward", ("out", False, SHAPE), "next", "forward-send-forward-recv"),
        (
            *("send_backward_recv_backward", ("grad", True, SHAPE)),
            *("next", "backward-send-backward-recv"),
        ),
        (
            *("send_backward_recv_backward", ("grad", False, SHAPE)),
            *("prev", "backward-send-backward-recv"),
        ),
        *(
            (
                *(BOTH, ("out", "grad", prev, following, SHAPE)),
                *(part, "forward-backward-send-forward-backward-recv"),
            )
            for prev, following, part in (
                *((True, False, "prev"), (False, True, "next"), (True, True, "both")),
                (False, False, "both"),
            )
        ),
        # At the ends of the pipeline nobody is waited for.
        ("recv_forward", (SHAPE, True), None, None),
        ("send_forward_recv_backward", ("out", SHAPE, True), None, None),
    ],
)
def test_a_calls_time_is_counted_for_the_neighbour_it_waits_for(
    call: str, arguments: tuple[Any, ...], part: str | None, timer: str | None
) -> None:
    stage = Stage()
    getattr(stage, call)(*arguments)
    assert stage.counted() == (({f"wait {part}": 5.0}, {timer: 5.0}) if part else ({}, {}))


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
    call: str, key: str, part: str, timer: str
) -> None:
    """Overlapped: the call only posts, and its handles are popped from a dictionary."""
    stage = Stage()
    received, handles = getattr(stage, call)("tensor", True, SHAPE, True)
    handles.pop(key).wait()
    found, timers = stage.counted()
    assert received == ("from prev" if "forward" in call else "from next")
    assert len(handles) == 1
    assert timers.pop(timer) == 3.0
    assert list(timers.values()) == [5.0]
    # Until then it is counted for the neighbour that something is sent to.
    sent_to = "wait next" if "forward" in call else "wait prev"
    assert Counter(found) == Counter({sent_to: 5.0}) + Counter({part: 3.0})
