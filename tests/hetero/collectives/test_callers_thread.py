"""Calls that nobody waits for at once, begun in their callers' threads as on a GPU."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
import torch.distributed as dist

from hetero.collectives.side_stream import SideStream
from tests.forked_ranks import values
from tests.hetero.collectives.ranks import THREE_AND_ONE, Side, run_ranks

ROUNDS = 60


@pytest.mark.parametrize("vendors", [("nvidia", "amd"), THREE_AND_ONE], ids=["1+1", "3+1"])
def test_they_stay_in_order_whoever_is_late(vendors: tuple[str, ...]) -> None:
    for begun_by_callers in values(run_ranks(call_in_turns, vendors)):
        assert begun_by_callers > 0, "no call was begun by its caller"


def as_on_a_gpu() -> list[bool]:
    """Have calls begun by their callers here too; what their first try has come to."""
    SideStream.exists = property(lambda self: True)  # type: ignore[assignment,method-assign]
    from hetero.collectives.group_communicator import Communicator

    tries: list[bool] = []
    progress = Communicator._progress

    def watched(self, running, *, on_side_stream=False, blocking=True):
        is_done = progress(self, running, on_side_stream=on_side_stream, blocking=blocking)
        if not blocking:
            tries.append(is_done)
        return is_done

    Communicator._progress = watched  # type: ignore[method-assign]
    return tries


def call_in_turns(side: Side) -> int:
    tries = as_on_a_gpu()
    ranks = torch.arange(side.size)[:, None]
    for number in range(ROUNDS):
        chance = random.Random(number)
        if chance.random() < 0.3 and side.rank == number % side.size:
            time.sleep(0.002)
        sums = [
            torch.full((chance.choice([1, 1000, 100_000, 3_000_000]),), float(side.rank + number))
            for _ in range(3)
        ]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in sums]
        tables = [torch.empty(side.size * length) for length in (77, 200_000)]
        for table in tables:
            row = torch.full((table.numel() // side.size,), float(side.rank))
            works.append(dist.all_gather_into_tensor(table, row, async_op=True))
        blocking = torch.ones(5)
        dist.all_reduce(blocking)
        assert (blocking == side.size).all(), "it has overtaken those before it"
        for work in works:
            work.wait()
        total = sum(rank + number for rank in range(side.size))
        assert all((tensor == total).all() for tensor in sums), number
        assert all((table.view(side.size, -1) == ranks).all() for table in tables), number
    return len(tries)


def test_a_caller_is_not_held_up_by_a_peer_that_has_not_come() -> None:
    values(run_ranks(come_late, ("nvidia", "amd")))


def come_late(side: Side) -> None:
    """Rank 1 makes its call only after rank 0's has returned."""
    tries = as_on_a_gpu()
    dist.all_reduce(torch.ones(3))
    tensor = torch.ones(1000)
    if side.rank == 1:
        side.hear("called")
    work = dist.all_reduce(tensor, async_op=True)
    if side.rank == 0:
        assert tries == [False]
        side.say("called")
    work.wait()
    assert (tensor == 2).all()


def test_a_callback_may_wait_for_the_next_calls_of_its_group() -> None:
    values(run_ranks(call_in_callbacks, ("nvidia", "amd"), patience=60.0))


def call_in_callbacks(side: Side) -> None:
    """As the communication hook of DDP's PowerSGD does. A GPU's barrier begins with a drain."""
    group = dist.group.WORLD
    assert group is not None

    def then(future: torch.futures.Future) -> torch.Tensor:
        (value,) = future.value()
        follow_up = dist.all_reduce(value.clone(), async_op=True).get_future()
        group._cpu_communicator.drain()
        dist.barrier()
        return follow_up.wait()[0]

    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(2)]
    assert (works[0].get_future().then(then).wait() == side.size**2).all()
    works[1].wait()


@pytest.mark.parametrize("method", ["record_end", "wait_event"])
def test_a_gpu_that_fails_in_the_worker_ends_the_call_and_the_group(method: str) -> None:
    """Its driver then refuses all that is asked of it."""
    outcomes = run_ranks(fail_on_a_gpu, ("nvidia", "amd"), method=method, patience=60.0)
    for error in values(outcomes):
        assert "rank 1" in error
        assert "an illegal memory access" in error


def fail_on_a_gpu(side: Side) -> str:
    as_on_a_gpu()
    dist.all_reduce(torch.ones(3))
    original = getattr(SideStream, side.options["method"])

    def failing(self: SideStream, *arguments: object) -> object:
        if threading.current_thread() is threading.main_thread():
            return original(self, *arguments)
        raise RuntimeError("an illegal memory access was encountered")

    if side.rank == 1:
        setattr(SideStream, side.options["method"], failing)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        side.say("called")  # so late that it was left to the worker
    else:
        side.hear("called")
        work = dist.all_reduce(torch.ones(3), async_op=True)

    def go_on() -> None:
        work.wait()
        dist.all_reduce(torch.ones(3))

    with pytest.raises(RuntimeError) as error:
        go_on()
    return str(error.value)
