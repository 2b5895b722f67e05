"""What it costs a rank that others share its sequences: a part of the work, and a ring on top."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero.plan import Mesh, Plan
from hetero.planner.analytic_profile import analytic_profile
from hetero.planner.cluster_shape import Cluster, LinkModel, cluster_from_mapping
from hetero.planner.communication_costs import next_rank_seconds
from hetero.planner.layer_profile import PartCosts, Point
from hetero.planner.model_shape import ModelShape, load_model
from hetero.planner.placement import Placement
from hetero.planner.plan_memory import stage_memory
from hetero.planner.search_space import context_sizes
from hetero.planner.stage_costs import stage_costs
from hetero.planner.stage_shape import StageShape
from hetero.planner.step_costs import StepCosts, step_costs
from hetero.planner.training_options import TrainingOptions

LONG = load_model("llama3.1-8b", seq_length=131_072)
NODES = cluster_from_mapping({"nodes": [{"accelerator": "H200", "nodes": 4}]}, source="the test")


def nodes(*, link: float) -> Cluster:
    """The GPUs of a node reach each other at so many bytes a second."""
    (kind,) = NODES.kinds
    return replace(NODES, kinds=(replace(kind, intra_node=LinkModel(link, 0.0)),))


def stage(*, context: int = 1, recompute: str = "none", tensor: int = 1) -> StageShape:
    return StageShape(
        kind="H200",
        layers=(1,),
        has_embedding=False,
        has_head=False,
        tensor=tensor,
        context=context,
        recompute=recompute,
    )


def costs_of(shape: StageShape, cluster: Cluster = NODES, model: ModelShape = LONG) -> PartCosts:
    profile = analytic_profile(model, cluster)
    return stage_costs(cluster, shape, model=model, profile=profile, options=TrainingOptions())


def priced(mesh: Mesh, *, batch: int = 8, model: ModelShape = LONG) -> StepCosts:
    mesh = replace(mesh, micro_batch_size=1, distributed_optimizer=True)
    layers = tuple((model.layers // mesh.stages,) for _ in range(mesh.stages))
    placement = Placement(Plan((mesh,), layers), ("H200",), batch)
    profile = analytic_profile(model, NODES)
    return step_costs(placement, model=model, cluster=NODES, profile=profile)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("context", [2, 8])
def test_ranks_that_share_a_long_sequence_share_its_work(context: int, recompute: str) -> None:
    """Attention hides the ring; what is left are sums in float32, a few per cent."""
    whole, part = (costs_of(stage(context=size, recompute=recompute)) for size in (1, context))
    for name in ("forward", "backward"):
        ratio = getattr(part.layer, name) * context / getattr(whole.layer, name)
        assert 1 < ratio < 1.1
    assert part.head.forward == pytest.approx(whole.head.forward / context)
    assert part.embedding.backward == pytest.approx(whole.embedding.backward / context)


def test_attention_costs_more_than_that_of_a_sequence_as_short_as_a_rank_s_rows() -> None:
    """A short sequence has a 64th of it, not an 8th."""
    short = analytic_profile(LONG, NODES).costs("H200", Point(1, 1, LONG.seq_length // 8))
    assert costs_of(stage(context=8)).layer.forward > 2.5 * short.layer.forward


def test_a_slow_ring_takes_what_attention_does_not_hide() -> None:
    """Keys and values go round once, and back with gradients of twice their bytes."""
    link = 1e8
    rows = LONG.seq_length / 4
    sent = rows * 2 * LONG.key_width * 2 / link
    fast, slow = (costs_of(stage(context=4), nodes(link=each)) for each in (1e15, link))
    attention = LONG.attention_flops / LONG.layer_flops * costs_of(stage()).layer.forward
    hidden = 3 / 4 * attention / 4
    assert slow.layer.forward - fast.layer.forward == pytest.approx(3 * sent - hidden, rel=1e-3)
    attention = LONG.attention_flops / LONG.layer_flops * costs_of(stage()).layer.backward
    hidden = 3 / 4 * attention / 4
    backward = slow.layer.backward - fast.layer.backward
    assert backward == pytest.approx(3 * sent + 4 * 2 * sent - hidden, rel=1e-3)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_attention_sends_keys_and_values_round_again(recompute: str) -> None:
    once, again = (
        [costs_of(stage(context=4, recompute=each), nodes(link=link)) for link in (1e6, 1e15)]
        for each in ("none", recompute)
    )
    slow_forward = once[0].layer.forward - once[1].layer.forward
    more = [costs[0].layer.backward - costs[1].layer.backward for costs in (again, once)]
    assert more[0] - more[1] == pytest.approx(slow_forward, rel=1e-3)


@pytest.mark.parametrize(
    ("tensor", "context", "over_nodes"), [(1, 8, False), (4, 2, False), (1, 16, True), (8, 2, True)]
)
def test_a_ring_over_nodes_sends_over_their_nics(
    tensor: int, context: int, over_nodes: bool
) -> None:
    (kind,) = NODES.kinds
    shape = stage(tensor=tensor, context=context)
    link = kind.rail if over_nodes else kind.intra_node
    assert next_rank_seconds(NODES, shape, 1e9) == pytest.approx(link.seconds(1e9))


def test_a_ring_that_begins_in_the_middle_of_a_node_may_lie_on_two() -> None:
    shape = replace(stage(context=4), first_gpu=6)
    assert next_rank_seconds(NODES, shape, 1e9) > next_rank_seconds(NODES, stage(context=4), 1e9)


def test_activations_are_shared_and_weights_are_not() -> None:
    alone, shared = (priced(Mesh("nvidia", 1, context=size)).memory[0][0] for size in (1, 8))
    assert shared.weights == alone.weights
    assert shared.gradients == alone.gradients
    assert shared.optimizer == pytest.approx(alone.optimizer / 8)
    # Two pairs of keys and values, in bf16 and float32, and float32 gradients of the queries.
    ring = LONG.seq_length / 8 * (4 * LONG.key_width * 6 + LONG.attention_width * 4)
    assert shared.activations == pytest.approx(alone.activations / 8 + ring)


def test_the_memory_of_a_plan_without_a_cluster_is_the_same() -> None:
    mesh = Mesh("nvidia", 2, context=4, micro_batch_size=1, distributed_optimizer=True)
    plan = Plan((mesh,), ((16,), (16,)))
    for number, rank in enumerate(priced(mesh).memory[0]):
        found = stage_memory(plan, number, LONG, micro_batches=8, options=TrainingOptions())
        assert found.memory == rank


def test_gradients_are_reduced_over_all_ranks_with_the_same_weights() -> None:
    sharing = priced(Mesh("nvidia", 1, context=4, data=2))
    apart = priced(Mesh("nvidia", 1, data=8))
    assert sharing.reduce == apart.reduce
    assert sharing.update == apart.update


def test_each_rank_sends_its_rows_to_the_next_stage() -> None:
    whole, quarter = (
        priced(Mesh("nvidia", 2, context=size)).pipelines[0].edges[0] for size in (1, 4)
    )
    assert quarter.occupancy == pytest.approx(whole.occupancy / 4)


def test_sizes_that_are_tried_unasked_leave_each_rank_many_rows() -> None:
    assert context_sizes(8192, 8) == (1,)
    assert context_sizes(16_384, 8) == (1, 2)
    assert context_sizes(131_072, 8) == (1, 2, 4, 8)
    assert context_sizes(131_072, 4) == (1, 2, 4)


def test_a_group_lies_on_one_node_or_has_all_of_several() -> None:
    (kind,) = NODES.kinds
    assert [kind.usable_gpus(1, size) for size in (2, 8, 16)] == [32, 32, 32]
    assert kind.usable_gpus(2, 3) == 8
