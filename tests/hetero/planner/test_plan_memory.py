"""The estimate of a rank's memory beside what was measured."""

from __future__ import annotations

import pytest

from hetero.plan import Mesh, Plan
from hetero.planner.model_shape import ModelShape, load_model
from hetero.planner.plan_memory import stage_memory
from hetero.planner.training_options import TrainingOptions


@pytest.mark.parametrize(
    ("data", "stage", "measured"), [(1, 0, 107.7), (1, 1, 83.8), (2, 0, 84.0), (2, 1, 62.6)]
)
def test_the_estimate_is_within_four_percent_of_what_was_measured(
    data: int, stage: int, measured: float
) -> None:
    """LLaMA-8B on H200s, TP1 PP2, sequence 4096: docs/benchmarks/published_table.md."""
    model = load_model("llama3.1-8b", seq_length=4096)
    mesh = Mesh("nvidia", 2, data=data, micro_batch_size=2, distributed_optimizer=True)
    plan = Plan((mesh,), layers=((17,), (15,)))
    options = TrainingOptions(reserved_bytes=0)
    memory = stage_memory(plan, stage, model, micro_batches=64 // data, options=options).memory
    assert memory.peak / 2**30 == pytest.approx(measured, rel=0.04)


def test_elements_of_four_bytes_take_twice_the_activations() -> None:
    model = load_model("llama3.2-1b")
    plan = Plan((Mesh("amd", 2, micro_batch_size=1),), layers=((4, 4), (4, 4)))
    half, whole = (
        stage_memory(plan, 0, model, micro_batches=8, options=TrainingOptions(activation_bytes=n))
        for n in (2, 4)
    )
    # But for the statistics of attention, which are fp32 in either.
    assert whole.memory.activations == pytest.approx(2 * half.memory.activations, rel=1e-3)
    assert half.micro_batches == 2.5


SMALL = ModelShape(
    layers=8,
    hidden=512,
    ffn=1408,
    heads=8,
    query_groups=4,
    head_size=64,
    vocabulary=2048,
    seq_length=512,
    gated=True,
    tied=False,
)


@pytest.mark.parametrize(
    ("recompute", "stage", "measured"),
    [("full", 0, 0), ("none", 1, 21), ("full", 1, 214)],
)
def test_delayed_weight_gradients_take_what_was_measured_but_for_a_layer_or_so(
    recompute: str, stage: int, measured: float
) -> None:
    """MiB on a CPU, float32: two stages of four layers of width 512, 2,048 tokens a micro-batch."""
    mesh = Mesh("amd", 2, micro_batch_size=4, recompute=recompute)
    plan = Plan((mesh,), layers=((4,), (4,)))
    at_once, delayed = (
        stage_memory(
            plan,
            stage,
            SMALL,
            micro_batches=4,
            options=TrainingOptions(activation_bytes=4, delay_weight_gradients=waits),
        ).memory.peak
        for waits in (False, True)
    )
    assert (delayed - at_once) / 2**20 == pytest.approx(measured, abs=80)
