"""The plan: where every rank stands, and which layers it holds."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import UserError
from hetero.plan import Mesh, Plan, split_over_chunks
from tests.hetero.plan.drawn_plans import MIXED, REPLICAS, plans

# Ranks.


@given(plans())
def test_coordinate_and_rank_at_are_each_others_inverse(plan: Plan) -> None:
    for rank in range(plan.world_size):
        c = plan.coordinate(rank)
        assert c.rank == rank
        assert plan.rank_at(c.stage, data=c.data, tensor=c.tensor) == rank
        assert c.mesh in {block.mesh for block in plan.blocks_of_stage(c.stage)}
    vendors = [plan.vendor_of_rank(rank) for rank in range(plan.world_size)]
    assert vendors == [mesh.vendor for mesh in plan.meshes for _ in range(mesh.world_size)]


@given(plans())
def test_tensor_is_fastest_then_data_then_stage(plan: Plan) -> None:
    places = [plan.coordinate(rank) for rank in range(plan.world_size)]
    keys = [(c.stage, c.data, c.tensor) for c in places]
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
