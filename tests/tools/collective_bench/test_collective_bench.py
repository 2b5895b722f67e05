"""The collectives' benchmark without processes: sizes, factors, references, the table."""

from __future__ import annotations

import pytest
import torch

from hetero.tools.collective_bench.boundary_links import boundary_pairs
from hetero.tools.collective_bench.collective_files import table_text
from hetero.tools.collective_bench.collective_record import (
    OPERATIONS,
    BoundaryPoint,
    Options,
    Point,
    Record,
    bus_factor,
    crossing_share,
)
from hetero.tools.collective_bench.measured_operations import Setup, new_case, places_of

TWO_AND_TWO = ("nvidia", "nvidia", "amd", "amd")
THREE_AND_ONE = ("nvidia", "nvidia", "nvidia", "amd")


def setup_of(rank: int = 0, **changes) -> Setup:
    values = {"ranks": 4, "count": 400, "dtype": torch.float32, "reduction": "sum"} | changes
    return Setup(rank=rank, device=torch.device("cpu"), **values)


def test_sizes_grow_by_the_factor_up_to_the_largest() -> None:
    assert Options(smallest=4, largest=70, factor=4).sizes == (4, 16, 64)
    assert Options(smallest=8, largest=8).sizes == (8,)


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
    for in_place in places_of(operation):
        case = new_case(operation, in_place=in_place, setup=setup_of(rank=2))
        case.result.copy_(case.expected)
        assert case.wrong() == 0
        case.result[-1] += 1
        assert case.wrong() == 1
        case.refill()
        assert case.wrong() > 0, "what an earlier call left does not count as a result"


def test_parts_at_each_others_places_are_counted() -> None:
    case = new_case("all_gather", in_place=False, setup=setup_of(count=4096))
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


def point(backend: str, **values) -> Point:
    fields = {
        "operation": "all_reduce",
        "in_place": True,
        "nbytes": 65536,
        "wrong": 0,
        "time_us": 200.0,
        "time_p99_us": 300.0,
        "latency_us": 210.0,
        "latency_p99_us": 310.0,
        "algbw_gb_s": 0.33,
        "busbw_gb_s": 0.5,
        "queue_depth": 1,
        "samples": 9,
        "boundary_us": 100.0,
    }
    return Point(backend=backend, **fields | values)


def test_the_table_sets_backends_beside_each_other_and_beside_the_links() -> None:
    record = Record(
        facts={"device": "a CPU", "cores": 2, "torch": "2.13", "date": "today"},
        options=Options(),
        vendors=("nvidia", "amd"),
        hosts=("a", "a"),
        points=(point("gloo", time_us=400.0), point("hetero"), point("gloo", nbytes=1 << 20)),
        boundary=(BoundaryPoint(nbytes=65536, one_way_us=50.0, both_ways_us=100.0),),
        boundary_transport="shm",
        notes=("nccl: not measured, because it needs GPUs",),
    )
    lines = table_text(record).splitlines()
    assert lines[0] == "ranks 1 nvidia + 1 amd on 1 host, a CPU (2 cores), torch 2.13, today; " + (
        "float32, sum"
    )
    assert lines[1] == record.notes[0]
    rows = [line.split() for line in lines if line.startswith("all_reduce")]
    # Place, size; time, p99 and busbw of each; the links' time, and that over hetero's.
    assert rows[0][1:] == "in 64 KiB 400 300 0.50 200 300 0.50 100 0.50 0".split()
    assert rows[1][1:] == "in 1 MiB 200 300 0.50 100 0".split()
    assert "0.66 GB/s each way at once, 1.31 GB/s one way" in lines[-1]
