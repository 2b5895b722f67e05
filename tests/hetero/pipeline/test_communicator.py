"""megatron-core's pipeline p2p over links: the same calls, returns and neighbours."""

from __future__ import annotations

import inspect
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from hetero.link.base import Link
from hetero.pipeline.communicator import PipelineCommunicator
from tests.hetero.pipeline.fake_link import FakeLink

SHAPE = (2, 3)


class Stage:
    """A communicator between two fake neighbours."""

    def __init__(self, *, first: bool = False, last: bool = False, virtual: int | None = None):
        self.up, self.down = FakeLink(), FakeLink()
        self.group = cast(Any, object())
        config = SimpleNamespace(
            pipeline_dtype=torch.float32,
            virtual_pipeline_model_parallel_size=virtual,
            timers=None,
        )
        self.p2p = PipelineCommunicator(
            pp_group=self.group,
            config=config,
            upstream=None if first else cast(Link, self.up),
            downstream=None if last else cast(Link, self.down),
            device=torch.device("cpu"),
            after_gradient=lambda: self.sent_before.append(len(self.up.sent)),
        )
        self.sent_before: list[int] = []
        """Of each piece of work that waited for a gradient: gradients that had been sent."""

    def is_quiet(self) -> bool:
        return not (self.up.sent or self.down.sent or self.up.recvs or self.down.recvs)


def full(value: float) -> torch.Tensor:
    return torch.full(SHAPE, value)


def values(*tensors: Any) -> list[float]:
    """Of tensors of the shape that is sent, what each is full of."""
    found = [tensor.detach().flatten()[0].item() for tensor in tensors]
    assert all(torch.equal(t.detach(), full(v)) for t, v in zip(tensors, found, strict=True))
    return found


# The same interface.


def test_what_is_replaced_takes_what_megatron_cores_takes() -> None:
    """A new megatron-core that changes one of its signatures is seen here."""

    def parameters(owner: type[P2PCommunicator]) -> list[tuple[str, Any, Any]]:
        listed = inspect.signature(owner._communicate).parameters.values()
        return [(p.name, p.kind, p.default) for p in listed]

    assert parameters(PipelineCommunicator) == parameters(P2PCommunicator)


def test_all_that_megatron_core_sends_or_receives_goes_through_what_is_replaced() -> None:
    for name, method in inspect.getmembers(P2PCommunicator, inspect.isfunction):
        if not name.startswith("_"):
            assert "self._communicate(" in inspect.getsource(method), name


def test_the_schedules_find_the_group_and_the_virtual_size() -> None:
    stage = Stage(virtual=3)
    assert stage.p2p.pp_group is stage.group
    assert stage.p2p.virtual_pipeline_model_parallel_size == 3


# Receiving and sending, from and to either side.


@pytest.mark.parametrize("as_shape", [tuple, list, torch.Size])
@pytest.mark.parametrize("side", ["up", "down"])
def test_what_arrives_has_the_form_of_the_shapes_that_were_asked_for(
    side: str, as_shape: Any
) -> None:
    stage = Stage()
    take = stage.p2p.recv_forward if side == "up" else stage.p2p.recv_backward
    assert take(as_shape(SHAPE), True) is None
    assert take([as_shape(SHAPE)] * 2, True) == [None, None]
    assert stage.is_quiet(), "an end of the pipeline"
    getattr(stage, side).ready.extend(map(full, (5.0, 1.0, 2.0)))
    received = take(as_shape(SHAPE), False)
    assert values(received) == [5.0]
    assert received.dtype == torch.float32
    assert received.requires_grad
    assert received.is_leaf
    listed = take([as_shape(SHAPE)] * 2, False)
    assert values(*listed) == [1.0, 2.0]


def test_activations_go_downstream_and_gradients_upstream() -> None:
    stage = Stage()
    stage.p2p.send_forward(full(1.0), True)
    stage.p2p.send_backward([full(1.0)], True)
    stage.p2p.send_forward([None], False)
    assert stage.is_quiet(), "an end of the pipeline, or nothing to send"
    stage.p2p.send_forward(full(1.0), False)
    stage.p2p.send_backward([full(2.0), full(3.0)], False)
    assert values(*stage.down.sent) == [1.0]
    assert values(*stage.up.sent) == [2.0, 3.0]


def test_deferred_work_runs_after_the_send_and_before_the_next_wait() -> None:
    stage = Stage()
    stage.p2p.send_backward(full(1.0), False)
    with suppress(IndexError):  # nobody sends what is waited for
        stage.p2p.send_backward_recv_forward(full(2.0), SHAPE, False)
    assert stage.sent_before == [1, 2]


def test_a_send_is_never_waited_for() -> None:
    stage = Stage()
    stage.up.ready.extend([full(1.0)] * 3)
    stage.down.ready.extend([full(1.0)] * 3)
    p2p = stage.p2p
    p2p.send_forward(full(1.0), False)
    p2p.send_backward(full(1.0), False)
    p2p.send_forward_recv_backward(full(1.0), SHAPE, False)
    p2p.send_backward_recv_forward(full(1.0), SHAPE, False)
    p2p.send_forward_recv_forward(full(1.0), True, SHAPE)
    p2p.send_backward_recv_backward(full(1.0), True, SHAPE)
    p2p.send_forward_backward_recv_forward_backward(full(1.0), full(1.0), True, True, SHAPE)
    assert not any(work.waited for work in stage.up.sends + stage.down.sends)
    assert all(work.waited for work in stage.up.recvs + stage.down.recvs)
    assert (len(stage.up.sends), len(stage.down.sends)) == (4, 4)


@pytest.mark.parametrize("side", ["up", "down"])
def test_sending_and_receiving_at_once_answers_in_the_form_of_what_was_sent(side: str) -> None:
    stage = Stage()
    link = getattr(stage, side)
    both = {
        "up": stage.p2p.send_backward_recv_forward,
        "down": stage.p2p.send_forward_recv_backward,
    }[side]
    link.ready.extend(map(full, (7.0, 8.0)))
    assert values(both(full(1.0), SHAPE, False)) == [7.0]
    assert values(*both([full(2.0)], [SHAPE], False)) == [8.0]
    assert values(*link.sent) == [1.0, 2.0]
    assert both([full(2.0)], [SHAPE], True) == [None]
    assert both(full(2.0), SHAPE, True) is None


# Interleaved.


def test_interleaved_steps_pass_on_and_take_if_there_is_anything() -> None:
    stage = Stage()
    assert stage.p2p.send_forward_recv_forward(None, False, SHAPE) is None
    assert stage.p2p.send_backward_recv_backward(None, False, SHAPE) is None
    assert stage.p2p.send_forward_recv_forward(None, False, SHAPE, True) == (None, {})
    both = stage.p2p.send_forward_backward_recv_forward_backward
    assert both(None, None, False, False, SHAPE) == (None, None)
    assert stage.is_quiet()
    stage.up.ready.extend(map(full, (1.0, 5.0)))
    stage.down.ready.extend(map(full, (2.0, 6.0)))
    assert values(stage.p2p.send_forward_recv_forward(full(3.0), True, SHAPE)) == [1.0]
    assert values(stage.p2p.send_backward_recv_backward(full(4.0), True, SHAPE)) == [2.0]
    assert values(*both(full(7.0), full(8.0), True, True, SHAPE)) == [5.0, 6.0]
    assert values(*stage.down.sent) == [3.0, 7.0]
    assert values(*stage.up.sent) == [4.0, 8.0]


def test_overlap_hands_out_the_handles_under_megatron_cores_names() -> None:
    """The schedules look handles up as megatron-core's `_p2p_ops` names them."""
    stage = Stage()
    stage.up.ready.append(full(1.0))
    stage.down.ready.append(full(2.0))
    forward, ahead = stage.p2p.send_forward_recv_forward(full(3.0), True, SHAPE, True)
    backward, back = stage.p2p.send_backward_recv_backward(full(4.0), True, SHAPE, True)
    assert set(ahead) == {"send_next", "recv_prev"}
    assert set(back) == {"send_prev", "recv_next"}
    works = [*stage.up.recvs, *stage.down.recvs]
    assert not any(work.waited for work in works), "with overlap the schedule waits, later"
    for handles in (ahead, back):
        for work in handles.values():
            work.wait()
    assert values(forward, backward) == [1.0, 2.0]


# Mistakes.


def test_a_neighbour_that_the_plan_does_not_have_is_a_clear_error() -> None:
    with pytest.raises(RuntimeError, match="neighbour that the plan does not have"):
        Stage(last=True).p2p.send_forward(full(1.0), False)
    with pytest.raises(RuntimeError, match="neighbour that the plan does not have"):
        Stage(first=True).p2p.send_forward_recv_forward(None, True, SHAPE)


# Receives that are posted before they are asked for.


def test_told_how_many_will_come_it_posts_the_next_receive_before_it_is_asked_for() -> None:
    stage = Stage()
    stage.up.ready.extend(map(full, (1.0, 2.0, 3.0)))
    stage.down.ready.extend(map(full, (4.0, 5.0)))
    stage.p2p.expect(activations=3, gradients=2)
    assert values(stage.p2p.recv_forward(SHAPE, False)) == [1.0]
    assert (len(stage.up.recvs), len(stage.down.recvs)) == (2, 1)
    assert [work.waited for work in stage.up.recvs] == [True, False]
    assert not stage.down.recvs[0].waited
    assert values(stage.p2p.send_forward_recv_backward(full(0.0), SHAPE, False)) == [4.0]
    assert values(stage.p2p.send_backward_recv_forward(full(0.0), SHAPE, False)) == [2.0]
    assert values(stage.p2p.recv_forward([SHAPE], False)[0]) == [3.0]
    assert values(stage.p2p.recv_backward(SHAPE, False)) == [5.0]
    assert not stage.up.ready, "and never more than will come"
    assert not stage.down.ready
    assert all(work.waited for work in stage.up.recvs + stage.down.recvs)


def test_the_first_stage_posts_the_receive_of_gradients_with_its_first_send() -> None:
    stage = Stage(first=True)
    stage.down.ready.extend(map(full, (4.0,)))
    stage.p2p.expect(activations=0, gradients=1)
    assert stage.p2p.recv_forward([SHAPE], True) == [None]
    stage.p2p.send_forward([full(1.0)], False)
    assert len(stage.down.recvs) == 1
    assert values(stage.p2p.recv_backward(SHAPE, False)) == [4.0]


def test_nothing_is_posted_ahead_where_that_would_hold_a_part_of_the_device() -> None:
    stage = Stage()
    stage.up.receives_ahead = False
    stage.up.ready.extend(map(full, (1.0, 2.0)))
    stage.p2p.expect(activations=2, gradients=0)
    assert values(stage.p2p.recv_forward(SHAPE, False)) == [1.0]
    assert len(stage.up.recvs) == 1
