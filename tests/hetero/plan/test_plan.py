"""Plans: coordinates of ranks, layers of stages, and the slabs between stages."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import UserError
from hetero.plan import (
    Mesh,
    Plan,
    split_over_chunks,
)
from hetero.plan.plan import Layout, Slab, layout_of, slabs
from tests.hetero.plan.drawn_plans import MIXED, REPLICAS, plans

# Ranks.


@given(plans())
def test_coordinate_and_rank_at_are_each_others_inverse(plan: Plan) -> None:
    for rank in range(plan.world_size):
        c = plan.coordinate(rank)
        assert c.rank == rank
        assert plan.rank_at(c.stage, data=c.data, context=c.context, tensor=c.tensor) == rank
        assert c.mesh in {block.mesh for block in plan.blocks_of_stage(c.stage)}
    vendors = [plan.vendor_of_rank(rank) for rank in range(plan.world_size)]
    assert vendors == [mesh.vendor for mesh in plan.meshes for _ in range(mesh.world_size)]


@given(plans())
def test_tensor_is_fastest_then_context_then_data_then_stage(plan: Plan) -> None:
    places = [plan.coordinate(rank) for rank in range(plan.world_size)]
    keys = [(c.stage, c.data, c.context, c.tensor) for c in places]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


def test_whole_replicas_of_a_vendor_have_consecutive_ranks() -> None:
    places = [(c.data, c.stage, c.tensor) for c in map(REPLICAS.coordinate, range(12))]
    nvidia = [(data, stage, tensor) for stage in (0, 1) for data in (0, 1) for tensor in (0, 1)]
    assert places == nvidia + [(2, stage, tensor) for stage in (0, 1) for tensor in (0, 1)]
    for rank, (data, stage, tensor) in enumerate(places):
        assert REPLICAS.rank_at(stage, data=data, tensor=tensor) == rank
    assert (REPLICAS.stages, REPLICAS.world_size, REPLICAS.num_layers) == (2, 12, 4)
    assert [REPLICAS.vendor_of_rank(rank) for rank in (7, 8)] == ["nvidia", "amd"]
    assert not any(edge.is_boundary for edge in REPLICAS.edges())
    with pytest.raises(IndexError, match="no replica 3"):
        REPLICAS.rank_at(0, data=3)


def test_replicas_take_their_vendors_share_of_a_row_of_micro_batches() -> None:
    assert REPLICAS.shares(0) == REPLICAS.shares(1) == (3, 3, 1)
    assert REPLICAS.row(0) == 7
    assert (MIXED.shares(2), MIXED.row(2)) == ((1,), 1)


@pytest.mark.parametrize(
    ("meshes", "whole_replicas", "message"),
    [
        ((Mesh("amd", stages=1), Mesh("nvidia", stages=2)), True, "the same stages"),
        ((Mesh("amd", stages=1, share=2),), False, "a share of its own"),
    ],
)
def test_replicas_of_two_shapes_and_shares_of_stages_are_refused(
    meshes: tuple[Mesh, ...], whole_replicas: bool, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Plan(meshes=meshes, layers=((1,),), whole_replicas=whole_replicas)


@pytest.mark.parametrize("rank", [-1, 6])
def test_what_is_outside_the_plan_has_no_place_in_it(rank: int) -> None:
    with pytest.raises(IndexError, match=f"rank {rank} is outside the plan's 6 ranks"):
        MIXED.coordinate(rank)
    with pytest.raises(IndexError, match="3 stages"):
        MIXED.blocks_of_stage(3)


# Layers.


@given(plans())
def test_the_layer_ranges_partition_the_layers_in_the_schedules_order(plan: Plan) -> None:
    """A micro-batch visits every stage's first chunk, then every stage's second chunk, ..."""
    visited = [
        layer
        for chunk in range(plan.chunks)
        for stage in range(plan.stages)
        for layer in plan.layer_range(stage, chunk)
    ]
    assert visited == list(range(plan.num_layers))


@given(plans())
def test_a_chunk_holds_as_many_layers_as_the_plan_says(plan: Plan) -> None:
    for stage, counts in enumerate(plan.layers):
        assert tuple(len(plan.layer_range(stage, c)) for c in range(plan.chunks)) == counts


@given(layers=st.integers(0, 200), chunks=st.integers(1, 12))
def test_splitting_a_stage_over_chunks_loses_nothing_and_is_even(layers: int, chunks: int) -> None:
    parts = split_over_chunks(layers, chunks)
    assert len(parts) == chunks
    assert sum(parts) == layers
    assert sorted(parts, reverse=True) == list(parts)
    assert max(parts) - min(parts) <= 1


# Edges.


@given(plans())
def test_edges_join_consecutive_stages_and_wrap_around_only_when_interleaved(plan: Plan) -> None:
    edges = list(plan.edges())
    pairs = [(edge.source, edge.target) for edge in edges]
    straight = list(pairwise(range(plan.stages)))
    wraps = [(plan.stages - 1, 0)] if plan.stages > 1 and plan.chunks > 1 else []
    assert pairs == straight + wraps


@given(plans())
def test_an_edge_is_a_boundary_exactly_where_the_meshes_differ(plan: Plan) -> None:
    for edge in plan.edges():
        source, target = (plan.blocks_of_stage(s)[0].mesh for s in (edge.source, edge.target))
        assert edge.is_boundary == (source != target)


Numbers = np.ndarray
"""The number of each element, [sequence, batch]; the hidden axis is never split."""


def held_by(layout: Layout, rank: int, whole: Numbers) -> Numbers:
    """What a rank holds of the tensor, as megatron-core lays it out."""
    copy, tensor = divmod(rank, layout.tensor)
    data, context = divmod(copy, layout.context)
    mine = np.split(whole, layout.data, axis=1)[data]
    if layout.context > 1:
        chunks = np.split(mine, 2 * layout.context)
        mine = np.concatenate([chunks[context], chunks[2 * layout.context - 1 - context]])
    return np.split(mine, layout.tensor)[tensor] if layout.sequence_parallel else mine


def send(slab: Slab, layout: Layout, held: Numbers, sequence: int) -> Numbers:
    """What crosses, out of what the sending rank holds."""
    part = held
    if not layout.sequence_parallel:
        rows = layout.own_rows(slab.source, sequence)
        part = held[rows.start : rows.stop]
    return part[_indices(layout.in_part(slab, slab.source, sequence))]


def _indices(place: tuple[tuple[slice, ...], slice]) -> tuple[Numbers, Numbers]:
    """The elements of a slab's place in a part, rows by sequences."""
    rows, batch = place
    for interval in (*rows, batch):
        assert 0 <= interval.start < interval.stop
    return np.ix_(np.r_[rows], np.r_[batch])


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
    shapes = [draw(st.tuples(sizes, sizes, st.booleans())) for _ in range(2)]
    batch = draw(st.sampled_from([1, 2, 4, 6, 12]))
    units = [(2 * c if c > 1 else 1, c * t if sp else 1) for t, c, sp in shapes]
    unit = int(np.lcm.reduce([count for pair in units for count in pair]))
    layouts = []
    for tensor, context, is_parallel in shapes:
        data = draw(st.sampled_from([n for n in (1, 2, 3, 4) if batch % n == 0]))
        layouts.append(Layout(tensor, data, batch // data, is_parallel, context))
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
        place = _indices(target.in_part(slab, slab.target, sequence))
        assert (parts[slab.target][place] == -1).all()
        parts[slab.target][place] = sent
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
        if sequence // layout.context % layout.tensor == 0:
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
    sizes = product((1, 2, 4), (1, 2, 3), (1, 2), (False, True))
    for tensor, context, data, is_parallel in sizes:
        layout = Layout(tensor, data, 2, is_parallel, context)
        found = slabs(layout, layout, sequence=24)
        assert [(slab.source, slab.target) for slab in found] == [(i, i) for i in range(len(found))]
        assert len(found) == layout.ranks


def test_two_tensor_parallel_ranks_each_send_half_to_each_of_two_replicas() -> None:
    wide, replicas = Layout(2, 1, 2), Layout(1, 2, 1)
    found = slabs(wide, replicas, sequence=8)
    assert found == [
        Slab(0, 0, (range(4),), range(1)),
        Slab(0, 1, (range(4),), range(1, 2)),
        Slab(1, 0, (range(4, 8),), range(1)),
        Slab(1, 1, (range(4, 8),), range(1, 2)),
    ]
    assert wide.in_part(found[3], 1, 8) == ((slice(0, 4),), slice(1, 2))
    assert replicas.in_part(found[3], 1, 8) == ((slice(4, 8),), slice(0, 1))


def test_context_parallel_ranks_send_both_of_their_chunks_in_one_slab() -> None:
    shared, alone = Layout(1, 1, 1, context=2), Layout(1, 1, 1)
    first, second = slabs(shared, alone, sequence=16)
    assert first == Slab(0, 0, (range(4), range(12, 16)), range(1))
    assert shared.in_part(first, 0, 16) == ((slice(0, 8),), slice(0, 1))
    assert alone.in_part(first, 0, 16) == ((slice(0, 4), slice(12, 16)), slice(0, 1))
    assert second == Slab(1, 0, (range(4, 12),), range(1))


@pytest.mark.parametrize(
    ("source", "target", "says"),
    [
        (Layout(1, 1, 2), Layout(1, 2, 2), "take 2 and 4 sequences"),
        (Layout(1, 1, 1), Layout(4, 1, 1, True), "cannot share a sequence of 6"),
        (Layout(1, 1, 1), Layout(1, 1, 1, context=2), "cannot share a sequence of 6"),
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
