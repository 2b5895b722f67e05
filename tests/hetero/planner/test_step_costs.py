"""Costs of whole placements, and the steps that are simulated from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero.errors import UserError
from hetero.plan import Mesh, Plan
from hetero.planner.layer_profile import PartCosts, Point
from hetero.planner.placement import Placement
from hetero.planner.prediction import Prediction, estimate_seconds, simulate
from hetero.planner.step_costs import StepCosts, step_costs
from hetero.planner.training_options import TrainingOptions
from tests.hetero.planner.placements import MODEL, alone, cluster, mixed, profile


def priced(placement: Placement, **options: bool) -> StepCosts:
    return step_costs(
        placement,
        model=MODEL,
        cluster=cluster(),
        profile=profile(),
        options=TrainingOptions(**options),
    )


def played(placement: Placement, **options: bool) -> Prediction:
    costs = priced(placement, **options)
    return simulate(costs, placement, model=MODEL, cluster=cluster())


def test_one_stage_is_the_sum_of_its_parts() -> None:
    prediction = played(alone(batch=8))
    passes = 8 * MODEL.layers * 0.03
    update = MODEL.parameters * 1e-11
    assert prediction.seconds == pytest.approx(passes + update)
    assert prediction.tokens_per_second == pytest.approx(8 * 2048 / prediction.seconds)
    assert prediction.utilization(["H100-SXM"]) == pytest.approx(passes / prediction.seconds)


def test_replicas_divide_the_batch_and_reduce_their_gradients() -> None:
    costs = priced(alone(data=4, batch=8))
    assert costs.pipelines[0].micro_batches == 2
    # Four GPUs of a node: a ring moves 3/4 of the gradients twice over NVLink.
    size = MODEL.parameters * 4
    steps = 2 * 3 * (size / 4 / 450e9 + 10e-6)
    assert costs.reduce[0] == pytest.approx(steps)


def test_reduction_over_nodes_is_bound_by_the_fewest_nics() -> None:
    """Three replicas of nodes of 4 GPUs: the second stage has GPU 3 of one node and 0, 1 of the
    next."""
    inside, across = priced(alone(2, data=3, batch=6)).reduce
    assert inside == pytest.approx(2 * 2 * (MODEL.parameters / 2 * 4 / 3 / 450e9 + 10e-6), rel=1e-4)
    assert across == pytest.approx(2 * (2 / 3 * MODEL.parameters / 2 * 4 / 50e9), rel=0.02)


def test_a_ring_over_nodes_sends_and_receives_at_once() -> None:
    nodes = cluster(rail_both_ways_gbits=200)
    costs = step_costs(alone(data=8), model=MODEL, cluster=nodes, profile=profile())
    # Four NICs a node, each at half its speed in both directions.
    moved = 7 / 8 * MODEL.parameters * 4 / 4
    assert costs.reduce[0] == pytest.approx(2 * moved / 25e9, rel=0.02)


@pytest.mark.parametrize("order", [1, -1])
def test_each_end_of_a_transfer_has_its_own_rails(order: int) -> None:
    """Four NICs of 100 Gb/s carry what one of 400 Gb/s does, whichever node is listed first."""
    thin, fat = (
        replace(kind, rails=rails, rail=replace(kind.rail, bandwidth=50e9 / rails, latency=latency))
        for kind, rails, latency in zip(cluster().kinds, (4, 1), (1e-6, 9e-6), strict=True)
    )
    nodes = replace(cluster(), kinds=(thin, fat)[::order])
    placement = mixed(tensor=(4, 4))
    edge = (
        step_costs(placement, model=MODEL, cluster=nodes, profile=profile()).pipelines[0].edges[0]
    )
    assert edge.occupancy == pytest.approx(MODEL.boundary_bytes(1) / 50e9)
    assert edge.latency == 9e-6


def test_a_tied_embedding_is_summed_over_the_links_that_join_its_stages() -> None:
    tied = replace(MODEL, tied=True)
    size = MODEL.vocabulary * MODEL.hidden * 4

    def exchange(placement: Placement) -> float:
        costs = [
            step_costs(placement, model=model, cluster=cluster(), profile=profile())
            for model in (MODEL, tied)
        ]
        return costs[1].reduce[0] - costs[0].reduce[0]

    assert exchange(alone(2)) == pytest.approx(size / 450e9 + 10e-6)
    assert exchange(mixed()) == pytest.approx(size / 50e9 + 15e-6)


def test_a_boundary_carries_each_element_once_and_gathers_behind_it() -> None:
    plain, split = priced(mixed()), priced(mixed(tensor=(4, 4)))
    size = MODEL.boundary_bytes(1)
    assert plain.pipelines[0].edges[0].occupancy == pytest.approx(size / 50e9)
    assert split.pipelines[0].edges[0].occupancy == pytest.approx(size / 4 / 50e9)
    gathered = 3 * (size / 4 / 450e9 + 10e-6)
    assert split.pipelines[0].forward[1][0] == pytest.approx(4 * 0.01 + gathered)


def test_stages_of_one_node_exchange_over_its_links() -> None:
    edge = priced(alone(2)).pipelines[0].edges[0]
    assert edge.occupancy == pytest.approx(MODEL.boundary_bytes(1) / 450e9)
    assert edge.sender_rails == edge.receiver_rails == -1


def test_gpus_that_share_a_rail_share_its_bandwidth() -> None:
    few_rails = replace(cluster().kinds[1], rails=1)
    shared = replace(cluster(), kinds=(cluster().kinds[0], few_rails))
    costs = step_costs(mixed(tensor=(4, 4)), model=MODEL, cluster=shared, profile=profile())
    assert costs.pipelines[0].edges[0].occupancy == pytest.approx(MODEL.boundary_bytes(1) / 50e9)


def test_a_gpu_with_several_rails_sends_over_all_of_them() -> None:
    """As on nodes with 32 NICs of 100 Gbit/s for 8 GPUs."""
    few, kind = cluster(), cluster().kinds[1]
    many = replace(kind, rails=4 * kind.gpus_per_node, rail=kind.rail.scaled(1 / 4))
    several = replace(few, kinds=(few.kinds[0], many))
    for placement in (mixed(tensor=(4, 4)), mixed()):
        one, other = (
            step_costs(placement, model=MODEL, cluster=nodes, profile=profile())
            for nodes in (few, several)
        )
        edges, same = one.pipelines[0].edges[0], other.pipelines[0].edges[0]
        assert edges.occupancy == pytest.approx(same.occupancy)
        assert one.reduce == pytest.approx(other.reduce)


def test_overlapping_hides_reduction_behind_backward_but_for_its_last_part() -> None:
    exposed = priced(alone(data=4)).reduce[0]
    hidden = priced(alone(data=4), overlap_grad_reduce=True).reduce[0]
    assert hidden == pytest.approx(exposed / MODEL.layers)


def test_a_distributed_optimizer_updates_and_keeps_a_share() -> None:
    whole = alone(data=4)
    mesh = replace(whole.plan.meshes[0], distributed_optimizer=True)
    shared = replace(whole, plan=replace(whole.plan, meshes=(mesh,)))
    state, quarter = (priced(one).memory[0][0].optimizer for one in (whole, shared))
    assert quarter == pytest.approx(state / 4)
    gathered = 3 * (MODEL.parameters * 2 / 4 / 450e9 + 10e-6)
    assert priced(shared).update[0][0] == pytest.approx(MODEL.parameters / 4 * 1e-11 + gathered)


def test_meshes_of_unequal_replicas_share_the_optimizer_each_among_its_own() -> None:
    meshes = (
        Mesh("amd", 1, data=4, micro_batch_size=1, distributed_optimizer=True),
        Mesh("nvidia", 1, data=1, micro_batch_size=4, distributed_optimizer=True),
    )
    placement = Placement(Plan(meshes, ((4,), (4,))), ("MI300X", "H100-SXM"), 8)
    measured = profile()
    points = dict(measured.accelerators["H100-SXM"].points)
    points[Point(1, 4, 2048)] = points[Point(1, 1, 2048)]
    accelerators = dict(measured.accelerators)
    accelerators["H100-SXM"] = replace(accelerators["H100-SXM"], points=points)
    costs = step_costs(
        placement,
        model=MODEL,
        cluster=cluster(),
        profile=replace(measured, accelerators=accelerators),
    )
    amd, nvidia = costs.memory[0]
    assert nvidia.optimizer / nvidia.weights == pytest.approx(12 / 2)
    assert amd.optimizer / amd.weights == pytest.approx(12 / 2 / 4)


def test_earlier_stages_hold_more_micro_batches() -> None:
    memory = priced(alone(4, batch=8)).memory[0]
    assert [rank.activations for rank in memory] == [2 * count * 2**30 for count in (4, 3, 2, 1)]


def test_a_stage_has_room_for_what_its_largest_part_takes_for_a_while() -> None:
    def working(costs: PartCosts) -> PartCosts:
        sizes = {"layer": 2**28, "embedding": 2**27, "head": 2**29}
        return replace(costs, **{f"{name}_working_bytes": size for name, size in sizes.items()})

    measured = profile()
    accelerators = {
        name: replace(part, points={point: working(costs) for point, costs in part.points.items()})
        for name, part in measured.accelerators.items()
    }
    more = replace(measured, accelerators=accelerators)
    before, after = (
        step_costs(alone(4, batch=8), model=MODEL, cluster=cluster(), profile=one).memory[0]
        for one in (measured, more)
    )
    added = [new.peak - old.peak for new, old in zip(after, before, strict=True)]
    assert added == [2**28, 2**28, 2**28, 2**29]


def test_whole_replicas_take_shares_of_the_batch() -> None:
    meshes = (
        Mesh("amd", 1, micro_batch_size=1, share=3),
        Mesh("nvidia", 1, micro_batch_size=1),
    )
    plan = Plan(meshes, ((8,),), whole_replicas=True)
    placement = Placement(plan, ("MI300X", "H100-SXM"), 8)
    costs = step_costs(
        placement, model=MODEL, cluster=cluster(), profile=profile(mi300x=0.01, h100=0.03)
    )
    assert [chain.micro_batches for chain in costs.pipelines] == [6, 2]
    prediction = simulate(costs, placement, model=MODEL, cluster=cluster())
    assert prediction.utilization(["MI300X"]) == pytest.approx(prediction.utilization(["H100-SXM"]))
    # Both exchange all gradients, over one rail each, and add them up.
    assert costs.reduce[0] == pytest.approx(MODEL.parameters * (4 / 50e9 + 2e-12), rel=0.01)
    slower = cluster(rail_both_ways_gbits=240)
    both = step_costs(placement, model=MODEL, cluster=slower, profile=profile())
    assert both.reduce[0] == pytest.approx(MODEL.parameters * (4 / 30e9 + 2e-12), rel=0.01)


def test_the_estimate_and_the_simulation_of_a_placement_agree() -> None:
    for placement in (alone(), alone(4, batch=16), mixed(1, 1), mixed(2, 2, batch=16)):
        costs = priced(placement)
        simulate_candidate = simulate(costs, placement, model=MODEL, cluster=cluster()).seconds
        assert estimate_seconds(costs) == pytest.approx(simulate_candidate, rel=0.02)


def test_what_a_gpu_cannot_hold_does_not_fit() -> None:
    fitting = played(alone())
    assert fitting.fits
    (use,) = fitting.stages
    assert not replace(use, peak_bytes=81 * 2**30).fits


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        (alone(data=3, batch=8), "8 does not divide into steps of 3 samples"),
        (alone(8, data=2, batch=8), "takes 16 GPUs of H100-SXM; there are 8"),
        (replace(alone(), kinds=("MI300X",)), "a nvidia mesh cannot stand on MI300X of amd"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(placement: Placement, said: str) -> None:
    with pytest.raises(UserError, match=said):
        priced(placement)


def test_tensor_parallelism_over_nodes_is_refused() -> None:
    with pytest.raises(UserError, match="tensor size 8 is more than the 4 GPUs of a node"):
        priced(alone(tensor=8))
    meshes = (
        Mesh("nvidia", 1, tensor=1, micro_batch_size=1),
        Mesh("nvidia", 1, tensor=4, micro_batch_size=1),
    )
    shifted = Placement(Plan(meshes, ((4,), (4,))), ("H100-SXM", "H100-SXM"), 8)
    with pytest.raises(UserError, match="group of 4 of H100-SXM would lie over two nodes"):
        priced(shifted)
