"""Resharding between two stages: every element crosses once and arrives wherever it is needed."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.pipeline.reshard import Layout, Slab, layout_of, slabs
from hetero.plan import Mesh, Plan

Numbers = np.ndarray
"""The number of each element, [sequence, batch]; the hidden axis is never split."""


def held_by(layout: Layout, rank: int, whole: Numbers) -> Numbers:
    """What a rank holds of the tensor, as megatron-core lays it out."""
    data, tensor = divmod(rank, layout.tensor)
    mine = np.split(whole, layout.data, axis=1)[data]
    return np.split(mine, layout.tensor)[tensor] if layout.sequence_parallel else mine


def send(slab: Slab, layout: Layout, held: Numbers, sequence: int) -> Numbers:
    """What crosses, out of what the sending rank holds."""
    part = held
    if not layout.sequence_parallel:
        rows = layout.part(slab.source, sequence)
        part = held[rows.start : rows.stop]
    return part[_cut(layout.in_part(slab, slab.source, sequence))]


def _cut(place: tuple[slice, slice]) -> tuple[slice, slice]:
    assert all(0 <= interval.start < interval.stop for interval in place)
    return place


def gathered(layout: Layout, parts: list[Numbers], rank: int, held: int) -> Numbers:
    """What a rank has of its own part and, where it needs them, one all-gather of its group's."""
    if not layout.gathers:
        return parts[rank][:held]
    first = rank - rank % layout.tensor
    return np.concatenate(parts[first : first + layout.tensor])[:held]


sizes = st.sampled_from([1, 2, 3, 4])


@st.composite
def crossings(draw: st.DrawFn) -> tuple[Layout, Layout, int]:
    """Two layouts of one batch, and the length of a sequence that both can share."""
    pairs = [draw(st.tuples(sizes, st.booleans())) for _ in range(2)]
    batch = draw(st.sampled_from([1, 2, 4, 6, 12]))
    unit = int(np.lcm.reduce([t if sp else 1 for t, sp in pairs]))
    layouts = []
    for tensor, is_parallel in pairs:
        data = draw(st.sampled_from([n for n in (1, 2, 3, 4) if batch % n == 0]))
        layouts.append(Layout(tensor, data, batch // data, is_parallel))
    return layouts[0], layouts[1], unit * draw(st.integers(1, 5))


@settings(max_examples=300)
@given(crossings())
def test_each_element_crosses_once_and_arrives_wherever_it_is_needed(
    crossing: tuple[Layout, Layout, int],
) -> None:
    source, target, sequence = crossing
    whole = np.arange(sequence * source.batch).reshape(sequence, source.batch)
    rows = target.part_rows(sequence)
    parts = [np.full((rows, target.micro_batch_size), -1) for _ in range(target.ranks)]
    crossed: Counter[int] = Counter()
    for slab in slabs(source, target, sequence=sequence):
        sent = send(slab, source, held_by(source, slab.source, whole), sequence)
        assert sent.size == slab.elements
        crossed.update(sent.ravel().tolist())
        place = parts[slab.target][_cut(target.in_part(slab, slab.target, sequence))]
        assert (place == -1).all()
        place[...] = sent
    assert crossed == Counter(range(whole.size))
    for rank in range(target.ranks):
        needed = held_by(target, rank, whole)
        np.testing.assert_array_equal(gathered(target, parts, rank, len(needed)), needed)


@settings(max_examples=300)
@given(crossings())
def test_no_rank_sends_or_receives_more_than_its_part(crossing: tuple[Layout, Layout, int]) -> None:
    source, target, sequence = crossing
    sent, received = Counter[int](), Counter[int]()
    for slab in slabs(source, target, sequence=sequence):
        sent[slab.source] += slab.elements
        received[slab.target] += slab.elements
    for layout, counts in ((source, sent), (target, received)):
        assert max(counts.values()) == layout.part_rows(sequence) * layout.micro_batch_size
        if sequence % layout.tensor == 0:
            assert len(counts) == layout.ranks
            assert len(set(counts.values())) == 1


@given(crossings())
def test_gradients_go_back_as_activations_came(crossing: tuple[Layout, Layout, int]) -> None:
    source, target, sequence = crossing
    back = {
        Slab(s.target, s.source, s.rows, s.batch) for s in slabs(source, target, sequence=sequence)
    }
    assert back == set(slabs(target, source, sequence=sequence))


def test_stages_of_one_layout_exchange_one_slab_a_rank() -> None:
    for tensor, data, is_parallel in product((1, 2, 4), (1, 2), (False, True)):
        layout = Layout(tensor, data, 2, is_parallel)
        found = slabs(layout, layout, sequence=8)
        assert [(slab.source, slab.target) for slab in found] == [(i, i) for i in range(len(found))]
        assert len(found) == layout.ranks


def test_two_tensor_parallel_ranks_each_send_half_to_each_of_two_replicas() -> None:
    wide, replicas = Layout(2, 1, 2), Layout(1, 2, 1)
    found = slabs(wide, replicas, sequence=8)
    assert found == [
        Slab(0, 0, range(4), range(1)),
        Slab(0, 1, range(4), range(1, 2)),
        Slab(1, 0, range(4, 8), range(1)),
        Slab(1, 1, range(4, 8), range(1, 2)),
    ]
    assert wide.in_part(found[3], 1, 8) == (slice(0, 4), slice(1, 2))
    assert replicas.in_part(found[3], 1, 8) == (slice(4, 8), slice(0, 1))


@pytest.mark.parametrize(
    ("source", "target", "says"),
    [
        (Layout(1, 1, 2), Layout(1, 2, 2), "take 2 and 4 sequences"),
        (Layout(1, 1, 1), Layout(4, 1, 1, True), "cannot share a sequence of 6"),
    ],
)
def test_layouts_that_cannot_be_joined_are_refused(
    source: Layout, target: Layout, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        slabs(source, target, sequence=6)


def test_a_stages_layout_is_that_of_its_mesh() -> None:
    wide = Mesh("amd", 2, tensor=2, micro_batch_size=4, sequence_parallel=True)
    plan = Plan((wide, Mesh("nvidia", 1, data=2, micro_batch_size=2)), layers=((1,),) * 3)
    assert layout_of(plan, 1) == Layout(2, 1, 4, True)
    assert layout_of(plan, 2) == Layout(1, 2, 2)
    with pytest.raises(ValueError, match="not settled"):
        layout_of(Plan((Mesh("cpu", 1),), layers=((1,),)), 0)
