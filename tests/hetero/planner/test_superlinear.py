"""Two kinds of nodes that train faster together than the sum of each alone.

Eight L40S (48 GiB) train LLaMA-8B at 16,384 tokens fastest in four stages, whose memory forces an
uneven split of the layers on them; eight MI210 (64 GiB) lack speed, not memory. Together each kind
is one stage, and neither recomputes. Every plan is the best that the planner finds.
"""

from __future__ import annotations

from hetero.planner.analytic_profile import analytic_profile
from hetero.planner.cluster_shape import cluster_from_mapping
from hetero.planner.model_shape import load_model
from hetero.planner.search_space import Problem, SearchSpace
from hetero.planner.solution import SimulatedPlan, find_best_plans, restricted_to_vendor

MODEL = load_model("llama3-8b", seq_length=16384)
NODES = [{"accelerator": "L40S", "nodes": 1}, {"accelerator": "MI210", "nodes": 1}]
CLUSTER = cluster_from_mapping({"nodes": NODES}, source="the test")
PROBLEM = Problem(
    CLUSTER,
    MODEL,
    analytic_profile(MODEL, CLUSTER),
    SearchSpace(global_batch=64, sequence_parallel=True),
)


def best(problem: Problem) -> SimulatedPlan:
    found = find_best_plans(problem)
    assert found is not None
    return found.first


def stage_layers(plan: SimulatedPlan) -> list[int]:
    return [sum(chunks) for chunks in plan.placement.plan.layers]


def test_memory_of_one_vendor_spares_the_other_an_uneven_pipeline() -> None:
    l40s = best(restricted_to_vendor(PROBLEM, "nvidia"))
    mi210 = best(restricted_to_vendor(PROBLEM, "amd"))
    assert stage_layers(l40s) == [6, 9, 9, 8]

    together = best(PROBLEM)
    assert together.placement.kinds == ("MI210", "L40S")
    assert stage_layers(together) == [13, 19]
    assert {mesh.recompute for mesh in together.placement.plan.meshes} == {"none"}
    total = l40s.prediction.tokens_per_second + mi210.prediction.tokens_per_second
    assert together.prediction.tokens_per_second > 1.04 * total
