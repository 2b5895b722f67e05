"""A group's own methods take their arguments in each form that PyTorch's groups take."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.forked_ranks import values
from tests.hetero.collectives import references as ref
from tests.hetero.collectives.ranks import Side, run_ranks


def test_a_group_takes_one_tensor_and_a_reduction_a_root_or_a_timeout_for_options():
    values(run_ranks(call_without_options, ("nvidia", "amd")))


def call_without_options(side: Side) -> None:
    group: Any = dist.group.WORLD
    op, patience, root = dist.ReduceOp.MAX, timedelta(seconds=60), side.size - 1
    inputs = [ref.given(rank, (3,), torch.float64, seed=80) for rank in range(side.size)]
    mine, largest = inputs[side.rank], ref.reduced("MAX", inputs)
    table = [mine + rank for rank in range(side.size)]
    for how, timeout in (((), {}), ((patience,), {}), ((), {"timeout": patience})):
        total, copied, least, part = (mine.clone() for _ in range(4))
        blank = [torch.zeros_like(mine) for _ in inputs]
        works = [
            group.allreduce(total, op, *how, **timeout),
            group.broadcast(copied, root, *how, **timeout),
            group.reduce(least, root, op, *how, **timeout),
            group.reduce_scatter(part, table, op, *how, **timeout),
            group.allgather(blank, mine, *how, **timeout),
            group.barrier(*how, **timeout),
        ]
        for work in works:
            work.wait()
        assert_same([total, copied, *blank], [largest, inputs[root], *inputs], "of a group")
        assert_same([part], [largest + side.rank], "reduce_scatter of a group")
        assert_same([least], [largest if side.rank == root else mine], "reduce of a group")
        gathered = [torch.zeros_like(mine) for _ in inputs] if side.rank == root else []
        group.gather(gathered, mine, root, *how, **timeout).wait()
        group.scatter(part, gathered, root, *how, **timeout).wait()
        assert_same([part], [mine], "gather and scatter of a group")
    total, copied = mine.clone(), mine.clone()
    group.allreduce([total], op=op).wait()
    group.broadcast(copied, root=0).wait()
    assert_same([total, copied], [largest, inputs[0]], "by name")


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other), what
