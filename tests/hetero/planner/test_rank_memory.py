"""The estimate of a rank's memory beside what was measured and what models are built of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetero.plan import Mesh, Plan
from hetero.planner.model_shape import load_model
from hetero.planner.rank_memory import (
    layer_activation_bytes,
    parameters_of_rank,
    passes_in_flight,
    rank_memory,
)
from hetero.planner.training_options import TrainingOptions

OPTIONS = TrainingOptions(reserved_bytes=0)


def pipeline(*layers: int, **sizes: Any) -> Plan:
    mesh = Mesh("nvidia", len(layers), **{"micro_batch_size": 1, "recompute": "none"} | sizes)
    return Plan((mesh,), layers=tuple((count,) for count in layers))


@pytest.mark.parametrize(
    ("data", "stage", "measured"), [(1, 0, 107.7), (1, 1, 83.8), (2, 0, 84.0), (2, 1, 62.6)]
)
def test_the_estimate_is_within_four_percent_of_what_was_measured(
    data: int, stage: int, measured: float
) -> None:
    """LLaMA-8B on H200s, TP1 PP2, sequence 4096: docs/benchmarks/published_table.md."""
    model = load_model("llama3.1-8b", seq_length=4096)
    plan = pipeline(17, 15, data=data, micro_batch_size=2, distributed_optimizer=True)
    held = rank_memory(plan, stage, model, micro_batches=64 // data, options=OPTIONS)
    assert held.total / 2**30 == pytest.approx(measured, rel=0.04)


@pytest.mark.parametrize("name", ["llama3.1-8b", "llama3.2-1b", "qwen2-7b"])
def test_the_parameters_of_all_ranks_are_the_models(name: str) -> None:
    model = load_model(name)
    alone = pipeline(model.layers)
    assert parameters_of_rank(alone, 0, model) == model.parameters
    halves = pipeline(model.layers - 3, 3)
    # Both stages have a copy of a tied embedding.
    copy = model.vocabulary * model.hidden if model.tied else 0
    held = sum(parameters_of_rank(halves, stage, model) for stage in (0, 1))
    assert held == model.parameters + copy


def test_tensor_parallel_ranks_share_matrices_and_repeat_norms() -> None:
    model = load_model("llama3.1-8b")
    norms = (2 * model.layers + 1) * model.hidden
    split = parameters_of_rank(pipeline(model.layers, tensor=4), 0, model)
    assert 4 * split == model.parameters + 3 * norms


def test_a_layers_activations_are_those_of_the_paper() -> None:
    """sbh (10 + 24 / t), of which dropout's masks, 2 sbh, are left out; all by t in a sequence."""
    model = replace(
        load_model("llama3.1-8b"),
        ffn=4 * 4096,
        query_groups=32,
        gated=False,
    )
    sbh = model.seq_length * 2 * model.hidden
    for tensor in (1, 2, 8):
        mesh = Mesh("amd", 1, tensor=tensor, micro_batch_size=2)
        assert layer_activation_bytes(model, mesh, options=OPTIONS) == sbh * (8 + 24 / tensor)
        shared = replace(mesh, sequence_parallel=True)
        assert layer_activation_bytes(model, shared, options=OPTIONS) == sbh * 32 / tensor
        full = replace(shared, recompute="full")
        assert layer_activation_bytes(model, full, options=OPTIONS) == sbh * 2 / tensor
        kept = replace(mesh, attention_backend="unfused")
        scores = 5 * model.heads * model.seq_length / model.hidden / tensor
        assert layer_activation_bytes(model, kept, options=OPTIONS) == sbh * (
            8 + 24 / tensor + scores
        )
        dropped = replace(kept, recompute="selective")
        assert layer_activation_bytes(model, dropped, options=OPTIONS) == sbh * (8 + 24 / tensor)


def test_earlier_stages_hold_more_micro_batches() -> None:
    plan = pipeline(2, 2, 2, 2)
    assert [passes_in_flight(plan, stage, 99) for stage in range(4)] == [4, 3, 2, 1]
    assert [passes_in_flight(plan, stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    chunked = replace(plan, layers=((1, 1),) * 4)
    assert [passes_in_flight(chunked, stage, 99) for stage in range(4)] == [11, 9, 7, 5]
