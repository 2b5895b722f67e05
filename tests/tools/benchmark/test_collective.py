"""Collectives without processes: factors of their sizes, what must come of them, which links."""

from __future__ import annotations

import pytest
import torch

from hetero.tools.benchmark.collective import OPERATIONS, Setup, bus_factor, crossing_share
from hetero.tools.benchmark.limits import boundary_pairs

TWO_AND_TWO = ("nvidia", "nvidia", "amd", "amd")
THREE_AND_ONE = ("nvidia", "nvidia", "nvidia", "amd")


def setup_of(rank: int = 0, **changes) -> Setup:
    values = {"ranks": 4, "count": 400, "dtype": torch.float32, "reduction": "sum"} | changes
    return Setup(rank=rank, device=torch.device("cpu"), **values)


@pytest.mark.parametrize(
    ("operation", "factor", "two_and_two", "three_and_one"),
    [
        ("all_reduce", 1.5, 1.0, 1.0),
        # Every row crosses once.
        ("all_gather", 0.75, 0.5, 0.75),
        ("reduce_scatter", 0.75, 0.5, 0.75),
        # Each rank has a quarter for each rank of the other vendor.
        ("all_to_all", 0.75, 1.0, 0.75),
        ("broadcast", 1.0, 1.0, 1.0),
        # One of the ring's edges leads there.
        ("send_recv", 1.0, 1.0, 1.0),
    ],
)
def test_factors_of_busbw_are_those_of_nccl_tests_and_shares_are_what_has_to_cross(
    operation, factor, two_and_two, three_and_one
) -> None:
    assert bus_factor(operation, 4) == factor
    assert crossing_share(operation, TWO_AND_TWO) == two_and_two
    assert crossing_share(operation, THREE_AND_ONE) == three_and_one
    # Ranks that take turns cross at every edge of the ring.
    assert crossing_share("send_recv", ("nvidia", "amd", "nvidia", "amd")) == 2.0


def test_every_rank_of_the_larger_vendor_has_a_link() -> None:
    assert boundary_pairs(TWO_AND_TWO) == [(0, 2), (1, 3)]
    assert boundary_pairs(THREE_AND_ONE) == [(0, 3), (1, 3), (2, 3)]
    assert boundary_pairs(("amd", "nvidia", "nvidia")) == [(1, 0), (2, 0)]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_result_that_is_off_in_one_element_is_counted(operation) -> None:
    for case in setup_of(rank=2).cases(operation):
        case.result.copy_(case.expected)
        assert case.wrong() == 0
        case.result[-1] += 1
        assert case.wrong() == 1
        case.refill()
        assert case.wrong() > 0, "what an earlier call left does not count as a result"


def test_parts_at_each_others_places_are_counted() -> None:
    case = next(setup_of(count=4096).cases("all_gather"))
    parts = list(case.expected.chunk(4))
    case.result.copy_(torch.cat([parts[1], parts[0], *parts[2:]]))
    assert case.wrong() > 1000


@pytest.mark.parametrize(
    ("reduction", "dtype"),
    [
        ("sum", torch.bfloat16),
        ("sum", torch.int8),
        ("avg", torch.float16),
        ("min", torch.int64),
        ("max", torch.float32),
        ("product", torch.bfloat16),
    ],
)
def test_the_reference_is_the_reduction_of_all_inputs(reduction, dtype) -> None:
    setup = setup_of(dtype=dtype, reduction=reduction)
    inputs = torch.stack([setup.pattern(rank, 0, 400) for rank in range(4)]).double()
    expected = {
        "sum": inputs.sum(0),
        "avg": inputs.mean(0),
        "min": inputs.amin(0),
        "max": inputs.amax(0),
        "product": inputs.prod(0),
    }[reduction]
    assert setup.reduced(0, 400).dtype == dtype
    assert torch.equal(setup.reduced(0, 400).double(), expected)
    assert torch.equal(setup.reduced(100, 50).double(), expected[100:150])
