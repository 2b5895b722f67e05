"""Plans of other planners, charged as this project's own."""

from __future__ import annotations

import pytest

from bench.planner_validation.peer_plan import PeerPlan, PeerStage, Replica, seconds_of
from hetero.plan import Mesh, Plan
from hetero.planner.placement import Placement
from hetero.planner.prediction import simulate
from hetero.planner.search_space import Problem, SearchSpace
from hetero.planner.step_costs import step_costs
from tests.hetero.planner.placements import MODEL, cluster, profile

PROBLEM = Problem(cluster(), MODEL, profile(mi300x=0.02), SearchSpace(global_batch=16))
H100, MI300X = Replica("H100-SXM", 2), Replica("MI300X", 1)


def test_a_plan_that_a_file_can_say_takes_what_it_takes_here() -> None:
    peers = PeerPlan((PeerStage(3, (MI300X,) * 4, 1), PeerStage(5, (H100,) * 4, 1)))
    meshes = (
        Mesh("amd", 1, data=4, micro_batch_size=1),
        Mesh("nvidia", 1, tensor=2, data=4, micro_batch_size=1),
    )
    placement = Placement(Plan(meshes, ((3,), (5,))), ("MI300X", "H100-SXM"), 16)
    costs = step_costs(placement, model=MODEL, cluster=PROBLEM.cluster, profile=PROBLEM.profile)
    ours = simulate(costs, placement, model=MODEL, cluster=PROBLEM.cluster)
    assert seconds_of(peers, PROBLEM) == (pytest.approx(ours.seconds), True)
    assert peers.unsupported_reason(16) == ""


def test_a_stage_of_unlike_gpus_waits_for_the_slower() -> None:
    slow = PeerPlan((PeerStage(8, (MI300X,) * 2, 1),))
    unlike = PeerPlan((PeerStage(8, (MI300X, H100), 1),))
    assert seconds_of(unlike, PROBLEM)[0] == pytest.approx(seconds_of(slow, PROBLEM)[0], rel=0.05)
    assert unlike.unsupported_reason(16) == "a stage of unlike GPUs"


def test_a_batch_that_does_not_divide_takes_as_long_as_the_next_that_does() -> None:
    three = PeerPlan((PeerStage(8, (MI300X,) * 3, 1),))
    assert three.unsupported_reason(16) == "unequal numbers of micro-batches"
    assert three.unsupported_reason(18) == ""
    # Six micro-batches on some replicas, five on others.
    passes = 6 * 8 * 0.06
    assert passes < seconds_of(three, PROBLEM)[0] < passes * 1.2


def test_a_stage_without_layers_is_said_to_be_one() -> None:
    plan = PeerPlan((PeerStage(0, (H100,), 1), PeerStage(8, (H100,), 1)))
    assert plan.unsupported_reason(16) == "a stage without layers"


def test_stages_alike_are_told_together() -> None:
    stage = PeerStage(4, (H100, H100), 1)
    assert str(PeerPlan((stage, stage))) == (
        "2 stages of 4 layers on H100-SXM TP 2 x DP 2 (batch 1)"
    )
