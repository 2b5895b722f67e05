"""What a sparse layer costs a rank: its part of the experts, and tokens that go to others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetero.plan import Mesh, Plan
from hetero.planner.analytic_profile import analytic_profile
from hetero.planner.cluster_shape import Cluster, LinkModel, cluster_from_mapping
from hetero.planner.communication_costs import all_to_all_seconds, gather_seconds
from hetero.planner.expert_costs import EXCHANGE_HOST_SECONDS, exchange_seconds
from hetero.planner.layer_profile import (
    AcceleratorProfile,
    MeasuredProfile,
    PartCosts,
    PassTimes,
    ProfileError,
)
from hetero.planner.model_shape import ModelShape
from hetero.planner.placement import Placement
from hetero.planner.plan_memory import stage_memory
from hetero.planner.stage_costs import stage_costs
from hetero.planner.stage_shape import StageShape
from hetero.planner.step_costs import StepCosts, step_costs
from hetero.planner.training_options import TrainingOptions
from tests.hetero.planner.expert_models import DEEPSEEK_LIKE, QWEN3_30B, model
from tests.hetero.planner.placements import costs as costs_of_a_layer

QWEN = model(QWEN3_30B)
DEEPSEEK = model(DEEPSEEK_LIKE)
NODES, AMD = (
    cluster_from_mapping({"nodes": [{"accelerator": name, "nodes": 4}]}, source="the test")
    for name in ("H200", "MI300X")
)
EVEN = TrainingOptions(expert_dispatcher="alltoall", expert_imbalance=1.0)
ROW = QWEN.hidden * EVEN.activation_bytes
CHOSEN = QWEN.seq_length * QWEN.experts_per_token * ROW
"""Bytes that the experts of one micro-batch's tokens take, before any rank shares them."""


def nodes(*, link: float = 1e18, rail: float = 1e18) -> Cluster:
    """Links and NICs of so many bytes a second, without latency."""
    (kind,) = NODES.kinds
    own = replace(kind, intra_node=LinkModel(link, 0.0), rail=LinkModel(rail, 0.0))
    return replace(NODES, kinds=(own,))


def stage(**sizes: Any) -> StageShape:
    return StageShape(
        kind=sizes.pop("kind", "H200"),
        layers=(1,),
        sparse_layers=(1,),
        has_embedding=False,
        has_head=False,
        sequence_parallel=sizes.get("tensor", 1) > 1,
        **sizes,
    )


def costs_of(
    shape: StageShape, cluster: Cluster, options: TrainingOptions = EVEN, of: ModelShape = QWEN
) -> PartCosts:
    profile = analytic_profile(of, cluster)
    return stage_costs(cluster, shape, model=of, profile=profile, options=options)


def priced(mesh: Mesh, layers: tuple[tuple[int, ...], ...], of: ModelShape = DEEPSEEK) -> StepCosts:
    mesh = replace(mesh, micro_batch_size=1, distributed_optimizer=True)
    placement = Placement(Plan((mesh,), layers), ("H200",), 16)
    profile = analytic_profile(of, NODES)
    return step_costs(placement, model=of, cluster=NODES, profile=profile, options=EVEN)


def test_however_ranks_share_experts_each_computes_as_much() -> None:
    """Many tokens: neither weights nor the start of kernels is waited for."""
    many = {"micro_batch": 64, "data": 8}
    alone, shared = (costs_of(stage(experts=size, **many), nodes()).sparse_layer for size in (1, 8))
    assert shared.forward - EXCHANGE_HOST_SECONDS == pytest.approx(alone.forward, rel=1e-4)
    assert shared.backward - EXCHANGE_HOST_SECONDS == pytest.approx(alone.backward, rel=1e-4)


@pytest.mark.parametrize("sizes", [{"data": 1}, {"data": 8}, {"data": 4, "context": 2}])
def test_with_few_tokens_the_host_that_starts_kernels_is_waited_for(sizes: dict[str, int]) -> None:
    """Whatever ranks share of the layer, in the forward pass and when it is recomputed."""
    few = model(QWEN3_30B, seq_length=256)
    alone, again = (
        costs_of(stage(recompute=kind), NODES, of=few).sparse_layer for kind in ("none", "full")
    )
    assert again.forward == alone.forward
    assert again.backward == pytest.approx(alone.backward + alone.forward)
    assert costs_of(stage(**sizes), NODES, of=few).sparse_layer == alone


def test_ranks_that_exchange_tokens_wait_for_the_host_once_more_in_each_pass() -> None:
    few = model(QWEN3_30B, seq_length=256)
    alone, two, eight = (
        costs_of(stage(experts=size, data=8), NODES, of=few).sparse_layer for size in (1, 2, 8)
    )
    assert two.forward == pytest.approx(alone.forward + EXCHANGE_HOST_SECONDS)
    assert two.backward == pytest.approx(alone.backward + EXCHANGE_HOST_SECONDS)
    assert eight == two


def test_expert_parallelism_shortens_a_loop_over_experts() -> None:
    """torch has no grouped product on AMD."""
    many = model(QWEN3_30B, seq_length=256, num_experts=1024)
    one, two, four = (
        costs_of(stage(kind="MI300X", experts=size, data=4), AMD, of=many).sparse_layer
        for size in (1, 2, 4)
    )
    two, four = (
        PassTimes(each.forward - EXCHANGE_HOST_SECONDS, each.backward - EXCHANGE_HOST_SECONDS)
        for each in (two, four)
    )
    assert one.forward - two.forward == pytest.approx(2 * (two.forward - four.forward))
    assert one.forward > costs_of(stage(), NODES, of=many).sparse_layer.forward


def test_the_busiest_rank_computes_more_where_ranks_hold_different_experts() -> None:
    uneven = replace(EVEN, expert_imbalance=1.5)
    part = QWEN.expert_flops / QWEN.sparse_layer_flops
    alone = costs_of(stage(micro_batch=64, data=8), nodes(), EVEN).sparse_layer
    for size, factor in ((1, 0.0), (8, 0.5 * part)):
        shape = stage(experts=size, micro_batch=64, data=8)
        even, busy = (costs_of(shape, nodes(), options).sparse_layer for options in (EVEN, uneven))
        assert busy.forward - even.forward == pytest.approx(alone.forward * factor, rel=1e-3)
        assert busy.backward - even.backward == pytest.approx(alone.backward * factor, rel=1e-3)


@pytest.mark.parametrize("experts", [2, 8])
def test_tokens_go_to_other_ranks_and_back_in_both_passes(experts: int) -> None:
    link = 1e9
    shape = stage(experts=experts, data=8)
    slow, slower = (costs_of(shape, nodes(link=each)).sparse_layer for each in (link, link / 2))
    there = CHOSEN * (experts - 1) / experts / link
    assert slower.forward - slow.forward == pytest.approx(2 * there, rel=1e-4)
    assert slower.backward - slow.backward == pytest.approx(2 * there, rel=1e-4)


def test_a_recomputed_layer_sends_its_tokens_again() -> None:
    shape = stage(experts=8, data=8, recompute="full")
    slow, slower = (costs_of(shape, nodes(link=each)).sparse_layer for each in (1e9, 5e8))
    forward = slower.forward - slow.forward
    assert slower.backward - slow.backward == pytest.approx(2 * forward, rel=1e-4)


def test_allgather_brings_every_rank_the_rows_of_all() -> None:
    gathering = replace(EVEN, expert_dispatcher="allgather")
    found = exchange_seconds(
        nodes(link=1e9), stage(experts=8, data=8), model=QWEN, options=gathering
    )
    assert found == pytest.approx(2 * 7 * QWEN.seq_length * ROW / 1e9)


def test_ranks_that_share_an_expert_gather_its_tokens() -> None:
    shape = stage(tensor=2, data=4, experts=4)
    found = exchange_seconds(nodes(link=1e9), shape, model=QWEN, options=EVEN)
    sent = CHOSEN / 2 * 3 / 4
    gathered = CHOSEN / 2
    assert found == pytest.approx(2 * (sent + gathered) / 1e9)


def test_experts_of_several_nodes_are_reached_over_their_nics() -> None:
    """Of 16 ranks half are on the other node, and each GPU has a NIC."""
    shape = stage(data=16, experts=16)
    inside = nodes(rail=1e9)
    assert all_to_all_seconds(inside, shape, 16e9) == pytest.approx(8)
    assert all_to_all_seconds(inside, replace(shape, experts=8), 16e9) < 0.1
    assert gather_seconds(inside, shape, ranks=16, size=16e9) > 1


def test_ranks_hold_a_part_of_the_experts_and_share_their_state_over_the_copies() -> None:
    mesh = Mesh("nvidia", 1, data=8, experts=4)
    shape = stage(data=8, experts=4)
    experts = QWEN.expert_parameters / 4
    assert shape.expert_parameters(QWEN) == experts
    assert shape.shared_parameters(QWEN) == QWEN.sparse_layer_parameters
    ((rank,),) = priced(mesh, ((QWEN.layers,),), QWEN).memory
    held = QWEN.layers * experts
    others = QWEN.parameters - QWEN.layers * QWEN.expert_parameters
    assert rank.weights == 2 * (others + held)
    assert rank.gradients == 4 * (others + held)
    assert rank.optimizer == 12 * (others / 8 + held / 2)


def test_a_stage_costs_what_its_own_layers_do() -> None:
    """The first of a DeepSeek-like model's layers is dense."""
    mesh = Mesh("nvidia", 3, data=8, experts=8)
    first, second, third = priced(mesh, ((9,), (9,), (9,))).memory[0]
    costs = costs_of(stage(data=8, experts=8), NODES, of=DEEPSEEK)
    sparse = DEEPSEEK.sparse_layer_parameters + DEEPSEEK.expert_parameters / 8
    dense = DEEPSEEK.layer_parameters
    assert second.weights == 2 * 9 * sparse
    assert first.weights == 2 * (DEEPSEEK.embedding_parameters + dense + 8 * sparse)
    assert third.weights == 2 * (9 * sparse + DEEPSEEK.head_parameters)
    middle = priced(mesh, ((9,), (9,), (9,))).pipelines[0]
    assert middle.forward[1] == (pytest.approx(9 * costs.sparse_layer.forward),)


def test_gradients_of_experts_are_reduced_over_the_ranks_with_the_same_experts() -> None:
    """With all experts on different ranks nothing is left to reduce but the other weights."""
    layers = ((DEEPSEEK.layers,),)
    once, twice, four = (
        priced(Mesh("nvidia", 1, data=8, experts=size), layers).reduce[0] for size in (8, 4, 2)
    )
    assert once < twice < four
    dense = priced(Mesh("nvidia", 1, data=8), layers, replace(DEEPSEEK, num_experts=0)).reduce[0]
    assert once < dense


def test_the_memory_of_a_plan_without_a_cluster_is_the_same() -> None:
    mesh = Mesh("nvidia", 2, tensor=2, data=4, experts=4, expert_tensor=1, sequence_parallel=True)
    mesh = replace(mesh, micro_batch_size=1, distributed_optimizer=True, recompute="full")
    plan = Plan((mesh,), ((14,), (13,)))
    for number, rank in enumerate(priced(mesh, plan.layers).memory[0]):
        found = stage_memory(plan, number, DEEPSEEK, micro_batches=4, options=EVEN)
        assert found.memory == rank


def test_the_busiest_rank_keeps_more_activations() -> None:
    shape, uneven = stage(data=8, experts=8), replace(EVEN, expert_imbalance=1.5)
    even, busy = (costs_of(shape, NODES, options) for options in (EVEN, uneven))
    rows = QWEN.seq_length * QWEN.experts_per_token * EVEN.activation_bytes
    more = 0.5 * rows * (QWEN.hidden + 3 * QWEN.expert_ffn)
    kept = busy.sparse_layer_activation_bytes - even.sparse_layer_activation_bytes
    assert kept == pytest.approx(more)


def test_a_profile_of_a_dense_model_has_no_layer_with_experts() -> None:
    shape = stage()
    points = {shape.point(QWEN): costs_of_a_layer()}
    measured = AcceleratorProfile(points, optimizer_seconds_per_parameter=0.0)
    with pytest.raises(ProfileError, match="no layer with experts"):
        stage_costs(
            NODES,
            shape,
            model=QWEN,
            profile=MeasuredProfile({"H200": measured}),
            options=EVEN,
        )


def test_a_measured_layer_is_taken_as_it_was_measured() -> None:
    """One device held all experts, so that it has what they take whatever their tokens, but no
    exchange."""
    shape = stage(data=2, experts=2)
    layer = replace(costs_of_a_layer(), sparse_layer=PassTimes(0.5, 1.0))
    measured = AcceleratorProfile({shape.point(QWEN): layer}, optimizer_seconds_per_parameter=0.0)
    profile = MeasuredProfile({"H200": measured})
    found = stage_costs(nodes(), shape, model=QWEN, profile=profile, options=EVEN)
    forward, backward = 0.5 + EXCHANGE_HOST_SECONDS, 1.0 + EXCHANGE_HOST_SECONDS
    assert found.sparse_layer == PassTimes(pytest.approx(forward), pytest.approx(backward))
