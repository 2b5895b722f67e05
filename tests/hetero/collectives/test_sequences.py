"""Random sequences of calls over random groups: nothing is lost and nothing hangs."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from tests.forked_ranks import values
from tests.hetero.collectives.ranks import FOUR_AND_FOUR, THREE_AND_ONE, Side, run_ranks


def test_hundreds_of_random_calls_over_random_groups():
    counts = values(run_ranks(walk, THREE_AND_ONE, calls=400, groups=6, seed=1))
    assert min(counts) > 100


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2, 6))
def test_thousands_of_random_calls_over_random_groups(seed):
    outcomes = run_ranks(walk, FOUR_AND_FOUR, calls=2500, groups=16, seed=seed, patience=1100)
    assert min(values(outcomes)) > 500


def walk(side: Side) -> int:
    """Every rank draws the same calls and takes part in those of its groups."""
    draw = random.Random(side.options["seed"])
    groups = [(tuple(range(side.size)), dist.group.WORLD)]
    while len(groups) < side.options["groups"]:
        ranks = tuple(sorted(draw.sample(range(side.size), draw.randint(2, side.size))))
        groups.append((ranks, dist.new_group(list(ranks))))
    taken, under_way = 0, []
    for number in range(side.options["calls"]):
        ranks, group = draw.choice(groups)
        operation = draw.choice(OPERATIONS)
        count = draw.choice((1, 3, 64, 1000, 30_000))
        root, waits = draw.choice(ranks), draw.random() < 0.5
        if side.rank not in ranks:
            continue
        taken += 1
        under_way.append(operation(ranks, group, side.rank, count=count, root=root, number=number))
        if waits or len(under_way) > 8:
            draw_order = random.Random(number)
            draw_order.shuffle(under_way)
            while under_way:
                work, check = under_way.pop()
                if work is not None:
                    work.wait()
                check()
    for work, check in under_way:
        if work is not None:
            work.wait()
        check()
    return taken


def _value(rank: int, number: int) -> float:
    return float((rank * 31 + number * 17) % 101)


def _all_reduce(ranks, group, rank, *, count, root, number):
    tensor = torch.full((count,), _value(rank, number), dtype=torch.float64)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    total = sum(_value(r, number) for r in ranks)
    return work, lambda: _same(tensor, total, number)


def _broadcast(ranks, group, rank, *, count, root, number):
    tensor = torch.full((count,), _value(rank, number))
    work = dist.broadcast(tensor, src=root, group=group, async_op=True)
    return work, lambda: _same(tensor, _value(root, number), number)


def _reduce(ranks, group, rank, *, count, root, number):
    tensor = torch.full((count,), _value(rank, number), dtype=torch.float64)
    work = dist.reduce(tensor, dst=root, op=dist.ReduceOp.MAX, group=group, async_op=True)
    result = max(_value(r, number) for r in ranks) if rank == root else None
    return work, lambda: result is None or _same(tensor, result, number)


def _all_gather(ranks, group, rank, *, count, root, number):
    output = torch.zeros(len(ranks), count)
    source = torch.full((1, count), _value(rank, number))
    work = dist.all_gather_into_tensor(output, source, group=group, async_op=True)

    def check():
        for row, r in zip(output, ranks, strict=True):
            _same(row, _value(r, number), number)

    return work, check


def _reduce_scatter(ranks, group, rank, *, count, root, number):
    output = torch.zeros(count, dtype=torch.float64)
    table = torch.full((len(ranks) * count,), _value(rank, number), dtype=torch.float64)
    work = dist.reduce_scatter_tensor(output, table, group=group, async_op=True)
    total = sum(_value(r, number) for r in ranks)
    return work, lambda: _same(output, total, number)


def _all_to_all(ranks, group, rank, *, count, root, number):
    output = torch.zeros(len(ranks), count)
    source = torch.full((len(ranks), count), _value(rank, number))
    work = dist.all_to_all_single(output, source, group=group, async_op=True)

    def check():
        for row, r in zip(output, ranks, strict=True):
            _same(row, _value(r, number), number)

    return work, check


def _barrier(ranks, group, rank, *, count, root, number):
    return dist.barrier(group=group, async_op=True), lambda: None


def _message(ranks, group, rank, *, count, root, number):
    """From the root to the rank after it."""
    target = ranks[(ranks.index(root) + 1) % len(ranks)]
    if rank == root:
        tensor = torch.full((count,), _value(root, number))
        return dist.isend(tensor, target, group=group, tag=number), lambda: None
    tensor = torch.zeros(count)
    if rank != target:
        return None, lambda: None
    work = dist.irecv(tensor, root, group=group, tag=number)
    return work, lambda: _same(tensor, _value(root, number), number)


OPERATIONS = (
    _all_reduce,
    _broadcast,
    _reduce,
    _all_gather,
    _reduce_scatter,
    _all_to_all,
    _barrier,
    _message,
)


def _same(tensor: torch.Tensor, value: float, number: int) -> bool:
    assert (tensor == value).all(), f"call {number}: {tensor[:3].tolist()} is not {value}"
    return True
