"""Who exchanges which part with whom for any numbers of ranks, and in which chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero.collectives.layout import (
    Layout,
    Member,
    Span,
    copy_segment,
    equal_parts,
    equal_segments,
    overlaps,
    shared_pieces,
)

VENDORS = st.lists(st.sampled_from(["nvidia", "amd", "cpu"]), min_size=2, max_size=9)


def layouts(vendors: list[str]) -> list[Layout]:
    members = tuple(
        Member(rank=rank, global_rank=10 + rank, host="host", vendor=vendor)
        for rank, vendor in enumerate(vendors)
    )
    return [Layout(members, rank) for rank in range(len(vendors))]


@given(st.integers(0, 1000), st.integers(1, 17))
def test_parts_cover_everything_once_and_only_the_last_are_shorter(count, parts):
    spans = equal_parts(count, parts)
    assert [spans[0].begin, spans[-1].end] == [0, count]
    assert all(one.end == other.begin for one, other in pairwise(spans))
    lengths = [len(span) for span in spans]
    assert lengths == sorted(lengths, reverse=True)
    assert sum(length not in (0, lengths[0]) for length in lengths) <= 1


@given(st.integers(1, 1000), st.integers(1, 9), st.integers(1, 9))
def test_what_one_side_sends_is_what_the_other_expects(count, here, there):
    ours, theirs = equal_parts(count, here), equal_parts(count, there)
    sent = [(i, j, common) for i, span in enumerate(ours) for j, common in overlaps(span, theirs)]
    expected = [
        (i, j, common) for j, span in enumerate(theirs) for i, common in overlaps(span, ours)
    ]
    assert sorted(sent, key=str) == sorted(expected, key=str)
    assert sum(len(common) for *_, common in sent) == count


@given(st.integers(1, 500), st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_every_element_is_reduced_by_one_vendor_and_all_its_holders_know_by_which(count, sizes):
    parts = tuple(equal_parts(count, size) for size in sizes)
    reducers: dict[int, set[tuple[int, int]]] = {}
    for vendor, shards in enumerate(parts):
        found = []
        for number, shard in enumerate(shards):
            for piece in shared_pieces(shard, parts):
                assert piece.holders[vendor] == number
                found += [
                    (element, (reducer, piece.holders[reducer]))
                    for reducer, part in enumerate(piece.parts)
                    for element in range(part.begin, part.end)
                ]
        assert [element for element, _ in found] == list(range(count))
        for element, reducer in found:
            reducers.setdefault(element, set()).add(reducer)
    assert all(len(named) == 1 for named in reducers.values())


@given(VENDORS)
def test_every_rank_sees_the_same_vendors_in_the_same_order(vendors):
    seen = {layout.vendors for layout in layouts(vendors)}
    assert len(seen) == 1
    (groups,) = seen
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(len(vendors)))
    assert [ranks[0] for ranks in groups] == sorted(ranks[0] for ranks in groups)


@given(VENDORS)
def test_inter_vendor_peers_are_mutual_and_include_partners(vendors):
    every = layouts(vendors)
    for layout in every:
        assert all(
            layout.rank in every[rank].inter_vendor_peers for rank in layout.inter_vendor_peers
        )
        partners = {layout.partner(layout.rank, vendor) for vendor in layout.other_vendors}
        assert partners <= set(layout.inter_vendor_peers)


@given(VENDORS)
def test_shards_are_balanced_and_every_rank_takes_part(vendors):
    for layout in layouts(vendors):
        spans = equal_parts(12 * layout.alignment, len(layout.vendor_ranks))
        assert len({len(span) for span in spans}) == 1
        reached = {layout.vendor_of(rank) for rank in layout.inter_vendor_peers}
        assert reached == set(layout.other_vendors)


def test_three_ranks_face_one():
    first, *_, last = layouts(["nvidia", "nvidia", "nvidia", "amd"])
    assert first.inter_vendor_peers == (3,)
    assert last.inter_vendor_peers == (0, 1, 2)
    assert [last.partner(3, 0), first.partner(0, 1)] == [0, 3]


def test_a_span_is_placed_in_the_memory_of_another():
    assert Span(3, 5).relative_to(Span(2, 9)) == slice(1, 3)
    assert overlaps(Span(0, 4), [Span(6, 9), Span(4, 6), Span(3, 5)]) == [(2, Span(3, 4))]


@pytest.mark.parametrize("count", [24, 40_000], ids=["small", "larger"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=["one dtype", "two dtypes"])
def test_a_segment_is_copied_into_its_place_and_nowhere_else(count, dtype):
    source, nbytes = torch.arange(count, dtype=torch.float32), 4 * count
    table = torch.zeros(3 * nbytes, dtype=torch.uint8).view(dtype)
    copy_segment(equal_segments(table, 3)[1], (source, 0, nbytes))
    before, copied, after = table.view(torch.uint8).view(3, -1)
    assert torch.equal(copied, source.view(torch.uint8))
    assert not before.any()
    assert not after.any()
