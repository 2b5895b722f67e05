"""In which form a call goes, and into which chunks it is cut, by its size and the group's ranks."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero.collectives.layout import Layout, Member, Span
from hetero.collectives.sizes import SIZES, sizes_for
from tests.forked_ranks import values
from tests.hetero.collectives.ranks import (
    THREE_AND_ONE,
    TWO_AND_TWO,
    Side,
    open_group,
    run_ranks,
)
from tests.hetero.collectives.test_operations import LARGE, check_copies, check_reductions

MIB = 1 << 20


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def layout(vendors: str, *, hosts: int = 2) -> Layout:
    members = tuple(
        Member(rank, rank, f"host{rank % hosts}", vendor) for rank, vendor in enumerate(vendors)
    )
    return Layout(members, 0)


@given(
    st.sampled_from(["na", "nnaa", "nnna", "nana"]),
    st.sampled_from([CPU, GPU]),
    st.integers(1, 1 << 34),
    st.sampled_from([1, 2, 8]),
)
def test_chunks_cover_everything_once_and_all_but_the_last_fall_into_equal_parts(
    vendors: str, device: torch.device, length: int, element_size: int
) -> None:
    here = layout(vendors)
    for spans in (
        sizes_for(here, device).reduced_chunks(here, length, element_size=element_size),
        sizes_for(here, device).columns(here, length, element_size=element_size, rows=len(vendors)),
    ):
        assert spans[0].begin == 0
        assert [span.begin for span in spans[1:]] == [span.end for span in spans[:-1]]
        assert spans[-1].end == length
        assert all(len(span) % here.alignment == 0 for span in spans[:-1])
        assert all(len(span) * element_size % 512 == 0 for span in spans[:-1])


@pytest.mark.parametrize(
    ("here", "device", "size"),
    [
        pytest.param(layout("na"), CPU, None, id="one rank a vendor"),
        pytest.param(layout("nnaa", hosts=1), CPU, None, id="CPUs of one host"),
        pytest.param(layout("nnaa"), CPU, 4 * MIB, id="CPUs of several hosts"),
        pytest.param(layout("nnaa"), GPU, 64 * MIB, id="GPUs"),
    ],
)
def test_columns_are_cut_where_steps_within_a_vendor_can_overlap_with_a_transfer(
    here: Layout, device: torch.device, size: int | None
) -> None:
    length = 256 * MIB
    spans = sizes_for(here, device).columns(here, length, element_size=1, rows=4)
    assert {len(span) for span in spans} == {length if size is None else size}


@pytest.mark.parametrize(
    ("total", "chunk"), [(100, 100), (256, 128), (512, 128), (1024, 256), (4096, 512)]
)
def test_gpus_reduce_in_quarters_of_128_to_512_mib(total: int, chunk: int) -> None:
    here = layout("na")
    spans = sizes_for(here, GPU).reduced_chunks(here, total * MIB, element_size=1)
    assert len(spans[0]) == chunk * MIB


@pytest.mark.parametrize(
    "vendors",
    [
        pytest.param(TWO_AND_TWO, id="2+2", marks=pytest.mark.slow),
        pytest.param(THREE_AND_ONE, id="3+1"),
    ],
)
def test_between_hosts_many_chunks_give_what_one_process_would(vendors: tuple[str, ...]) -> None:
    digests = values(run_ranks(large_calls, vendors, backend=None))
    assert all(other == digests[0] for other in digests), "the ranks hold different bits"


def large_calls(side: Side) -> dict[str, str]:
    """As on hosts of two ranks each, with chunks so small that a row has several."""
    socket.gethostname = lambda: f"host{side.rank // 2}"
    SIZES["cpu", True] = replace(SIZES["cpu", True], copied_chunk=(MIB, MIB))
    open_group(side)
    length = LARGE[0] * 4
    here = layout("nnaa")
    spans = sizes_for(here, CPU).columns(here, length, element_size=1, rows=side.size)
    assert len(spans) > 5
    digests: dict[str, str] = {}
    for dtype, name in ((torch.float32, "SUM"), (torch.uint8, "MAX")):
        check_reductions(side, name, dtype, LARGE, digests)
        check_copies(side, dtype, LARGE)
    return digests


def test_a_span_that_fits_into_one_chunk_is_not_cut() -> None:
    here = layout("na")
    spans = sizes_for(here, CPU).reduced_chunks(here, 1000, element_size=4)
    assert spans == [Span(0, 1000)]


@pytest.mark.parametrize(
    ("here", "device", "reduces", "copies"),
    [
        pytest.param(layout("na", hosts=1), CPU, MIB, None, id="one CPU rank a vendor"),
        pytest.param(layout("nnaa", hosts=1), CPU, 64 << 10, None, id="CPUs of one host"),
        pytest.param(layout("nnaa"), CPU, 64 << 10, 64 << 10, id="CPUs of several hosts"),
        pytest.param(layout("na"), GPU, 64 * MIB, 64 * MIB, id="one GPU a vendor"),
        pytest.param(layout("nnaa", hosts=1), GPU, 64 << 10, 64 << 10, id="GPUs"),
    ],
)
def test_small_calls_take_the_form_with_the_fewest_steps(
    here: Layout, device: torch.device, reduces: int, copies: int | None
) -> None:
    """`copies`: None if that is so for any size."""
    sizes = sizes_for(here, device)
    assert sizes.reduces_directly(here, reduces)
    assert not sizes.reduces_directly(here, reduces + 1)
    assert sizes.copies_directly(here, 1 << 40 if copies is None else copies)
    assert copies is None or not sizes.copies_directly(here, copies + 1)
