"""Profiles of parts that nobody measured, against a part that was."""

from __future__ import annotations

import pytest

from hetero.plan import Mesh, Plan
from hetero.planner.accelerators import built_in_accelerators
from hetero.planner.analytic_profile import AnalyticProfile, analytic_profile, measured_efficiency
from hetero.planner.cluster_shape import cluster_from_mapping
from hetero.planner.layer_profile import AcceleratorProfile, MeasuredProfile, Point, ProfileError
from hetero.planner.model_shape import load_model
from hetero.planner.placement import Placement
from hetero.planner.prediction import simulate
from hetero.planner.step_costs import step_costs

MODEL = load_model("llama3-8b", seq_length=4096)
CLUSTER = cluster_from_mapping(
    {"nodes": [{"accelerator": "H200", "gpus_per_node": 2}]}, source="the test"
)
ANALYTIC = analytic_profile(MODEL, CLUSTER)


@pytest.mark.parametrize(("micro_batch", "batch", "tflops"), [(2, 128, 571.6), (1, 32, 550.9)])
def test_two_h200_train_as_fast_as_measured(micro_batch: int, batch: int, tflops: float) -> None:
    """docs/benchmarks/published_table.md; the first row is what the efficiency comes from."""
    mesh = Mesh("nvidia", 2, micro_batch_size=micro_batch, distributed_optimizer=True)
    placement = Placement(Plan((mesh,), ((17,), (15,))), ("H200",), batch)
    costs = step_costs(placement, model=MODEL, cluster=CLUSTER, profile=ANALYTIC)
    prediction = simulate(costs, placement, model=MODEL, cluster=CLUSTER)
    reached = MODEL.flops * batch / prediction.seconds / 2 / 1e12
    assert reached == pytest.approx(tflops, rel=0.03)
    if micro_batch == 2:
        # PyTorch's own peaks, which do not have what the driver reserves.
        peaks = [(rank.peak - rank.reserved) / 2**30 for rank in costs.memory[0]]
        assert peaks == pytest.approx([107.7, 83.8], rel=0.04)


def test_recomputation_takes_time_and_gives_memory() -> None:
    none, full = (ANALYTIC.costs("H200", Point(1, 1, 4096, how)) for how in ("none", "full"))
    assert full.layer.backward == pytest.approx(none.layer.backward + none.layer.forward)
    assert full.layer_activation_bytes < none.layer_activation_bytes / 5


def test_tensor_parallelism_divides_work_and_adds_communication() -> None:
    one, four = (ANALYTIC.costs("H200", Point(size, 1, 4096)).layer for size in (1, 4))
    assert one.forward / 4 < four.forward < one.forward
    shared = ANALYTIC.costs("H200", Point(4, 1, 4096, sequence_parallel=True))
    alone = ANALYTIC.costs("H200", Point(4, 1, 4096))
    assert shared.layer_activation_bytes < alone.layer_activation_bytes


def test_the_efficiency_of_a_measured_part_is_found_again() -> None:
    points = [Point(1, 1, 4096), Point(2, 2, 4096), Point(1, 1, 4096, "full")]
    slow = AnalyticProfile(MODEL, dict(built_in_accelerators()), efficiency=0.42)
    costs = {point: slow.costs("H200", point) for point in points}
    measured = MeasuredProfile({"H200": AcceleratorProfile(costs, 1e-11)})
    assert measured_efficiency(measured, built_in_accelerators()["H200"], MODEL) == pytest.approx(
        0.42
    )
    with pytest.raises(ProfileError, match="has no MI300X"):
        measured_efficiency(measured, built_in_accelerators()["MI300X"], MODEL)


def test_a_part_faster_than_its_peak_is_refused() -> None:
    fast = AnalyticProfile(MODEL, dict(built_in_accelerators()), efficiency=1.5)
    costs = {Point(1, 1, 4096): fast.costs("H200", Point(1, 1, 4096))}
    measured = MeasuredProfile({"H200": AcceleratorProfile(costs, 1e-11)})
    with pytest.raises(ProfileError, match="faster than its peak allows"):
        measured_efficiency(measured, built_in_accelerators()["H200"], MODEL)
