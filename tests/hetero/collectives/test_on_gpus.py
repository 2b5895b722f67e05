"""Collectives of GPU tensors between simulated vendors, over as many GPUs as there are."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.forked_ranks import values
from tests.gpus import NEEDS_A_GPU, gpu_of
from tests.hetero.collectives import references as ref
from tests.hetero.collectives.ranks import TWO_AND_TWO, Side, run_ranks
from tests.hetero.collectives.test_operations import (
    ALL_REDUCTIONS,
    check_coalesced,
    check_copies,
    check_empty,
    check_objects,
    check_reductions,
    check_strided,
    check_uneven,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(100), NEEDS_A_GPU]

SHAPES = [
    pytest.param(vendors, id=name)
    for name, vendors in (
        ("1+1", ("nvidia", "amd")),
        ("2+2", TWO_AND_TWO),
        ("1+3 in turn", ("nvidia", "amd", "amd", "amd")),
        ("2+2 in turn", ("nvidia", "amd", "nvidia", "amd")),
    )
]
PATIENCE = 70.0
REFUSALS = (RuntimeError, ValueError)
SIZES = ((1,), (7, 3), (600_001,), (2_000_001,), (9_000_001,))
CHUNK_BYTES = 8 << 20


@pytest.mark.timeout(400)
@pytest.mark.parametrize("vendors", SHAPES)
def test_every_operation_gives_what_one_process_would(vendors):
    # Ranks that share a GPU take turns on it, and NCCL joins them over sockets.
    patience = PATIENCE * math.ceil(len(vendors) / torch.cuda.device_count())
    digests = values(run_ranks(walk_all, vendors, on_gpus=True, patience=patience))
    assert all(other == digests[0] for other in digests), "the ranks hold different bits"
    assert len(digests[0]) > 50


def walk_all(side: Side) -> dict[str, str]:
    digests: dict[str, str] = {}
    with gpu_of(side.rank):
        for dtype in ref.DTYPES:
            for name in ALL_REDUCTIONS:
                if name.startswith("B") and not (dtype is torch.bool and name != "BXOR"):
                    with pytest.raises(REFUSALS, match=r"no reduction|not support"):
                        dist.all_reduce(torch.ones(2).to(dtype), op=ref.op_of(name))
                elif ref.exists(name, dtype):
                    for shape in SIZES[:2]:
                        check_reductions(side, name, dtype, shape, digests)
            for shape in SIZES[:2]:
                check_copies(side, dtype, shape)
        for dtype, name in ((torch.float32, "SUM"), (torch.bfloat16, "AVG"), (torch.int64, "MAX")):
            for shape in SIZES[2:]:
                if shape == SIZES[-1]:
                    cut_gpu_calls_into(CHUNK_BYTES)
                check_reductions(side, name, dtype, shape, digests)
                check_copies(side, dtype, shape)
        for check in (check_coalesced, check_strided, check_uneven, check_objects, check_empty):
            check(side)
        messages(side)
    return digests


def cut_gpu_calls_into(nbytes: int) -> None:
    """Have later calls of the default group go in chunks of so many bytes."""
    group: Any = dist.group.WORLD
    context, chunk = group._gpu_communicator._context, (nbytes, nbytes)
    context.sizes = replace(context.sizes, reduced_chunk=chunk, copied_chunk=chunk)


def messages(side: Side) -> None:
    """Both ways at once and around a ring, small and larger than a link's memory."""
    after, before = (side.rank + 1) % side.size, (side.rank - 1) % side.size
    for count in (5, 20 << 20):
        large, received = torch.full((count,), float(side.rank)), torch.zeros(count)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, large, after), dist.P2POp(dist.irecv, received, before)]
        )
        for work in works:
            work.wait()
        assert (received == before).all()
        own = torch.zeros(count)
        torch.cuda._sleep(2_000_000)
        large.add_(1)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, own, side.rank), dist.P2POp(dist.isend, large, side.rank)]
        )
        for work in works:
            work.wait()
        large.zero_()
        assert (own == side.rank + 1).all()


@pytest.mark.parametrize("vendors", SHAPES)
def test_calls_are_ordered_with_the_streams_that_make_them(vendors):
    values(run_ranks(use_streams, vendors, on_gpus=True, patience=PATIENCE))


def use_streams(side: Side) -> None:
    """Each call begins after a slow kernel before it, and what waits for it sees its result."""
    device, total = gpu_of(side.rank), sum(range(side.size))
    others = [torch.cuda.Stream(device) for _ in range(2)]
    tensors = [torch.empty(1 << 18, device=device) for _ in range(12)]
    for i, tensor in enumerate(tensors):
        with torch.cuda.stream(others[i % 2]):
            tensor.zero_()
            torch.cuda._sleep(2_000_000)
            tensor.add_(side.rank + i)
            work = dist.all_reduce(tensor, async_op=i % 3 > 0)
            if work is not None:
                work.wait()
            tensor.mul_(2)
    futures = []
    for i in range(4):
        torch.cuda._sleep(2_000_000)
        future = dist.all_reduce(
            torch.full((99,), float(i), device=device), async_op=True
        ).get_future()
        futures.append(future.then(lambda done: done.value()[0] + 1))
    for i, future in enumerate(futures):
        assert (future.wait() == i * side.size + 1).all()
    torch.cuda.synchronize()
    for i, tensor in enumerate(tensors):
        assert (tensor == 2 * (total + i * side.size)).all(), i


@pytest.mark.parametrize("vendors", SHAPES[:1])
def test_the_stream_that_asks_for_a_future_goes_on_while_the_call_is_under_way(vendors):
    """DDP asks for each bucket's future in the middle of its backward pass."""
    values(run_ranks(ask_for_a_future, vendors, on_gpus=True, patience=PATIENCE))


def ask_for_a_future(side: Side) -> None:
    tensor = torch.ones(1 << 16, device=gpu_of(side.rank))
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if side.rank == 0:
        torch.cuda._sleep(6_000_000_000)
    work = dist.all_reduce(tensor, async_op=True)
    if side.rank == 1:
        time.sleep(0.3)
        future = work.get_future()
        here = torch.cuda.Event()
        here.record()
        here.synchronize()
        assert not work.is_completed(), "the caller's stream has waited for rank 0"
        future.wait()
    work.wait()
    assert (tensor == side.size**2).all()


@pytest.mark.parametrize("vendors", SHAPES[:2])
def test_a_cuda_graph_holds_no_call_and_the_group_goes_on(vendors):
    values(run_ranks(capture, vendors, on_gpus=True, patience=PATIENCE))


def capture(side: Side) -> None:
    tensor = torch.ones(1 << 16, device=gpu_of(side.rank))
    peer = (side.rank + side.size // 2) % side.size
    for call in (dist.all_reduce, partial(dist.isend, dst=peer), partial(dist.irecv, src=peer)):
        for _ in range(2):
            in_a_graph = torch.cuda.graph(torch.cuda.CUDAGraph())
            with pytest.raises(RuntimeError, match="CUDA graph cannot hold"), in_a_graph:
                call(tensor)
            dist.all_reduce(tensor)
            assert (tensor == side.size).all()
            tensor.fill_(1.0)
            torch.cuda.synchronize()


@pytest.mark.parametrize("vendors", SHAPES[:2])
def test_what_is_dropped_without_a_wait_is_not_given_to_others_too_early(vendors):
    values(run_ranks(drop, vendors, on_gpus=True, patience=PATIENCE))


def drop(side: Side) -> None:
    device = gpu_of(side.rank)
    kept = []
    for i in range(20):
        source = torch.full((1 << 20,), float(i), device=device)
        target = torch.empty(side.size << 20, device=device)
        torch.cuda._sleep(2_000_000)
        dist.all_gather_into_tensor(target, source, async_op=True)
        kept.append(target)
        del source
        torch.full((1 << 20,), -1.0, device=device)
    dist.barrier()
    torch.cuda.synchronize()
    for i, target in enumerate(kept):
        assert (target == i).all(), i


@pytest.mark.parametrize("vendors", SHAPES)
def test_a_rank_that_does_not_come_is_named_within_the_timeout(vendors):
    outcomes = run_ranks(one_stays_away, vendors, on_gpus=True, patience=PATIENCE, timeout=8.0)
    assert not any(outcome.hung for outcome in outcomes)
    for outcome in outcomes[:-1]:
        assert outcome.error is None
        text, seconds = outcome.value
        assert f"rank {len(vendors) - 1} " in text, text
        assert "all_reduce" in text, text
        assert seconds < 60, "it ended long after its timeout"


def one_stays_away(side: Side) -> tuple[str, float] | None:
    tensor = torch.ones(1000, device=gpu_of(side.rank))
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if side.rank == side.size - 1:
        side.hear("told")
        return None
    begin = time.monotonic()
    text = "nothing was raised"
    try:
        while time.monotonic() < begin + 30:
            dist.all_reduce(tensor)
            time.sleep(0.2)
    except RuntimeError as error:
        text = str(error)
    if side.rank == 0:
        side.say("told")
    return text, time.monotonic() - begin


@pytest.mark.parametrize("vendors", SHAPES[:2])
def test_ranks_that_call_different_things_are_told(vendors):
    outcomes = run_ranks(call_differently, vendors, on_gpus=True, patience=PATIENCE, timeout=8.0)
    assert not any(outcome.hung for outcome in outcomes)
    texts = [outcome.value for outcome in outcomes]
    assert any("all_reduce" in text and "broadcast" in text for text in texts), texts
    assert "nothing was raised" not in texts


def call_differently(side: Side) -> str:
    tensor = torch.ones(1000, device=gpu_of(side.rank))
    dist.all_reduce(tensor)
    try:
        for _ in range(100):
            if side.rank == side.size - 1:
                dist.broadcast(tensor, 0)
            else:
                dist.all_reduce(tensor)
            time.sleep(0.2)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"
