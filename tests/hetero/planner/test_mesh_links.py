"""GPUs with a link of their own to each other one: some of them share few links, all many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero.errors import UserError
from hetero.plan import Mesh, Plan
from hetero.planner.accelerators import accelerator_from_mapping
from hetero.planner.analytic_profile import analytic_profile
from hetero.planner.cluster_shape import LinkModel, cluster_from_mapping
from hetero.planner.communication_costs import edge_costs, ring_seconds
from hetero.planner.layer_profile import Point
from hetero.planner.model_shape import load_model
from hetero.planner.placement import Placement
from hetero.planner.stage_shape import pipeline_stages
from hetero.planner.training_options import TrainingOptions

MODEL = load_model("llama3-8b")
NODE = cluster_from_mapping({"nodes": [{"accelerator": "MI300X"}]}, source="the test")


def test_two_gpus_reach_the_one_link_between_them() -> None:
    link = LinkModel(bandwidth=7e9, latency=0.0, peers=7)
    assert ring_seconds(link, ranks=2, size=2e9) == pytest.approx(1.0)
    assert ring_seconds(link, ranks=8, size=8e9) == pytest.approx(1.0)
    behind_a_switch = replace(link, peers=None)
    assert ring_seconds(behind_a_switch, ranks=2, size=2e9) == pytest.approx(1 / 7)
    assert ring_seconds(behind_a_switch, ranks=8, size=8e9) == pytest.approx(1.0)


def test_a_stage_sends_to_the_next_one_over_one_link_a_gpu() -> None:
    mesh = Mesh("amd", 2, data=4, micro_batch_size=1)
    plan = Placement(Plan((mesh,), ((16,), (16,))), ("MI300X",), 4)
    ((first, second),) = pipeline_stages(plan, NODE, MODEL)
    edge = edge_costs(NODE, first, second, model=MODEL, options=TrainingOptions())
    link = NODE.kinds[0].accelerator.link_bandwidth / 7
    assert edge.occupancy == pytest.approx(MODEL.boundary_bytes(1) / link)


def test_tensor_parallelism_over_two_of_eight_mostly_waits() -> None:
    profile = analytic_profile(MODEL, NODE)
    alone, two, eight = (
        profile.costs("MI300X", Point(size, 1, 8192)).layer.forward for size in (1, 2, 8)
    )
    assert two > 0.7 * alone
    assert eight < 0.4 * alone


@pytest.mark.parametrize(("ranks", "gigabytes"), [(2, 25), (8, 150)])
def test_v100_reach_one_link_in_pairs_and_three_rings_together(ranks: int, gigabytes: int) -> None:
    """A DGX-1: of GPUs 0 and 1 a single NVLink, over all eight three rings both ways."""
    node = cluster_from_mapping({"nodes": [{"accelerator": "V100-SXM2-32GB"}]}, source="the test")
    assert node.kinds[0].intra_node.within(ranks).bandwidth == pytest.approx(gigabytes * 1e9)


def test_gpus_are_whole() -> None:
    figures = {"memory": 1, "tflops": 1, "memory_bandwidth": 1, "link": 1, "nic": 1}
    with pytest.raises(UserError, match=r"link_peers is 2\.5; GPUs are whole"):
        accelerator_from_mapping("X", {"vendor": "amd", **figures, "link_peers": 2.5}, where="here")
