"""How calls are cut into chunks, and in which order the steps of several chunks go."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero.collectives import overlapped_steps
from hetero.collectives.overlapped_steps import chunk_spans, columns, overlapped, row_chunks
from hetero.collectives.vendor_layout import Layout, Member, Span
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


def context(vendors: str, *, device: str = "cpu", hosts: int = 2) -> Any:
    members = tuple(
        Member(rank, rank, f"host{rank % hosts}", vendor) for rank, vendor in enumerate(vendors)
    )
    return SimpleNamespace(layout=Layout(members, 0), device=torch.device(device))


@given(
    st.sampled_from(["na", "nnaa", "nnna", "nana"]),
    st.sampled_from(["cpu", "cuda"]),
    st.integers(1, 1 << 34),
    st.sampled_from([1, 2, 8]),
)
def test_chunks_cover_everything_once(
    vendors: str, device: str, length: int, element_size: int
) -> None:
    here = context(vendors, device=device)
    for spans in (
        chunk_spans(here, length, element_size=element_size),
        row_chunks(here, length, element_size=element_size),
        columns(here, length, element_size=element_size, rows=len(vendors)),
    ):
        assert spans[0].begin == 0
        assert [span.begin for span in spans[1:]] == [span.end for span in spans[:-1]]
        assert spans[-1].end == length
        assert all(len(span) * element_size % 512 == 0 for span in spans[:-1])


@pytest.mark.parametrize(
    ("here", "size"),
    [
        pytest.param(context("na"), None, id="one rank a vendor"),
        pytest.param(context("nnaa", hosts=1), None, id="CPUs of one host"),
        pytest.param(context("nnaa"), 4 * MIB, id="CPUs of several hosts"),
        pytest.param(context("nnaa", hosts=1, device="cuda"), 128 * MIB, id="GPUs of one host"),
        pytest.param(context("nnaa", device="cuda"), 64 * MIB, id="GPUs of several hosts"),
    ],
)
def test_columns_are_cut_where_steps_within_a_vendor_can_overlap_with_a_transfer(
    here: Any, size: int | None
) -> None:
    length = 256 * MIB
    spans = columns(here, length, element_size=1, rows=4)
    assert {len(span) for span in spans} == {length if size is None else size}


@pytest.mark.parametrize(
    ("row", "chunk"), [(32, 32), (100, 64), (256, 64), (512, 128), (1024, 256), (4096, 256)]
)
def test_two_gpus_reduce_a_row_in_quarters_of_64_to_256_mib(row: int, chunk: int) -> None:
    spans = row_chunks(context("na", device="cuda"), row * MIB, element_size=1)
    assert len(spans[0]) == chunk * MIB


def test_two_gpus_reduce_whole_tensors_of_up_to_256_mib() -> None:
    for total, chunk in ((256, 256), (512, 256)):
        spans = chunk_spans(context("na", device="cuda"), total * MIB, element_size=1)
        assert len(spans[0]) == chunk * MIB


@given(st.integers(0, 7), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_each_chunk_s_steps_come_in_order_and_by_so_many_chunks_later(
    count: int, gaps: list[int]
) -> None:
    lags = [sum(gaps[:number]) for number in range(len(gaps))]
    done: list[tuple[int, int]] = []

    def step(number: int) -> Any:
        def run(chunk: int) -> Iterator[Any]:
            done.append((chunk, number))
            yield from ()

        return run

    list(overlapped(range(count), [(lag, step(n)) for n, lag in enumerate(lags)]))
    assert sorted(done) == [(chunk, n) for chunk in range(count) for n in range(len(lags))]
    place = {entry: position for position, entry in enumerate(done)}
    for chunk in range(count):
        assert [n for c, n in done if c == chunk] == list(range(len(lags)))
        for number, lag in enumerate(lags):
            if chunk + lag < count:
                assert place[chunk + lag, 0] < place[chunk, number] or lag == 0


@pytest.mark.parametrize(
    "vendors", [pytest.param(TWO_AND_TWO, id="2+2"), pytest.param(THREE_AND_ONE, id="3+1")]
)
def test_between_hosts_many_chunks_give_what_one_process_would(vendors: tuple[str, ...]) -> None:
    digests = values(run_ranks(large_calls, vendors, backend=None))
    assert all(other == digests[0] for other in digests), "the ranks hold different bits"


def large_calls(side: Side) -> dict[str, str]:
    """As on hosts of two ranks each, with chunks so small that a row has several."""
    socket.gethostname = lambda: f"host{side.rank // 2}"
    overlapped_steps._NETWORK_CHUNK_BYTES = MIB
    open_group(side)
    assert len(columns(context("nnaa"), LARGE[0] * 4, element_size=1, rows=side.size)) > 5
    digests: dict[str, str] = {}
    for dtype, name in ((torch.float32, "SUM"), (torch.uint8, "MAX")):
        check_reductions(side, name, dtype, LARGE, digests)
        check_copies(side, dtype, LARGE)
    return digests


def test_a_span_that_fits_into_one_chunk_is_not_cut() -> None:
    assert chunk_spans(context("na"), 1000, element_size=4) == [Span(0, 1000)]
