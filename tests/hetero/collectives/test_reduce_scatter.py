"""Rows of several chunks, which a vendor's only rank issues at once or a few ahead."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hetero.collectives.sizes import SIZES
from tests.forked_ranks import values
from tests.hetero.collectives.ranks import Side, run_ranks


@pytest.mark.parametrize(
    "vendors",
    [
        pytest.param(("nvidia", "amd"), id="1+1"),
        pytest.param(("nvidia", "amd", "cpu"), id="three vendors"),
    ],
)
def test_each_rank_keeps_its_row_of_the_sum(vendors: tuple[str, ...]) -> None:
    values(run_ranks(reduce_rows, vendors))


def reduce_rows(side: Side) -> None:
    _, chunk_bytes = SIZES["cpu", False].reduced_chunk
    for chunks in (1, 2, 3):
        length = chunks * chunk_bytes // 4 - 5
        tables = [_table(rank, side.size * length) for rank in range(side.size)]
        expected = sum(tables)[side.rank * length : (side.rank + 1) * length]
        own = tables[side.rank]
        apart = torch.empty(length)
        dist.reduce_scatter_tensor(apart, own)
        assert torch.equal(apart, expected)
        in_place = own[side.rank * length : (side.rank + 1) * length]
        dist.reduce_scatter_tensor(in_place, own)
        assert torch.equal(in_place, expected)


def _table(rank: int, numel: int) -> torch.Tensor:
    """Integers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-100, 100, (numel,), generator=generator).float()
