"""Who sends which gradients of a tied embedding to whom, where two meshes split it differently."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.hetero.tied_embedding import Interval, find_sources, plan_transfers

ELEMENTS = 24


@st.composite
def copies(draw: st.DrawFn) -> list[Interval]:
    """The intervals of one stage's ranks: tensor-parallel parts, replicated or split once more."""
    tensor, data = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 3]))
    is_split = draw(st.booleans())
    part = ELEMENTS // tensor
    found = []
    for replica in range(data):
        for begin in range(0, ELEMENTS, part):
            own = (begin, begin + part)
            if is_split:
                # A bucket of the distributed optimizer has padding, so shares need not be equal.
                share = -(-part // data) + 1
                first = min(replica * share, part)
                own = (begin + first, begin + min(first + share, part))
            found.append(own)
    return found


@given(copies(), copies())
def test_every_element_that_a_rank_has_gets_the_other_copys_once(
    first: list[Interval], last: list[Interval]
) -> None:
    owned = [*first, *last]
    received: Counter[tuple[int, int]] = Counter()
    found = plan_transfers(owned, first_stage_size=len(first))
    for moved in found:
        assert (moved.source < len(first)) != (moved.target < len(first))
        begin, end = owned[moved.source]
        assert begin <= moved.begin < moved.end <= end
        received.update((moved.target, element) for element in range(moved.begin, moved.end))
    wanted = {(rank, element) for rank, own in enumerate(owned) for element in range(*own)}
    assert received == Counter(wanted)
    pairs = Counter((moved.source, moved.target) for moved in found)
    assert set(pairs.values()) <= {1}, "one piece of memory for each"


def test_replicas_take_turns() -> None:
    sources = [(0, 8), (0, 8)]
    assert [find_sources((0, 8), sources, preferred=turn) for turn in (0, 1)] == [
        [(0, (0, 8))],
        [(1, (0, 8))],
    ]


def test_what_nobody_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="element 4"):
        find_sources((0, 8), [(0, 4)], preferred=0)
