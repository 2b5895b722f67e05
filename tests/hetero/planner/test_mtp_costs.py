"""Layers for multi-token prediction: on the last stage, each a layer, a projection and a head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetero.plan import Mesh, Plan
from hetero.planner.analytic_profile import analytic_profile
from hetero.planner.cluster_shape import Cluster, cluster_from_mapping
from hetero.planner.fp8 import WEIGHT_COPIES, Fp8, divides
from hetero.planner.layer_profile import MeasuredProfile, PartCosts, PassTimes
from hetero.planner.model_shape import ModelShape, load_model
from hetero.planner.placement import Placement
from hetero.planner.plan_memory import stage_memory
from hetero.planner.stage_costs import stage_costs
from hetero.planner.stage_shape import StageShape
from hetero.planner.step_costs import StepCosts, step_costs
from hetero.planner.training_options import TrainingOptions
from tests.hetero.planner.expert_models import DEEPSEEK_LIKE, model
from tests.hetero.planner.placements import MODEL, alone, cluster, mixed, profile

LLAMA = load_model("llama3-8b", seq_length=4096)
NODES = cluster_from_mapping({"nodes": [{"accelerator": "H100-SXM"}]}, source="the test")


def predicting(of: ModelShape, layers: int) -> ModelShape:
    return replace(of, mtp_layers=layers)


def last_stage(**sizes: Any) -> StageShape:
    return StageShape(
        **{
            "kind": "H100-SXM",
            "layers": (8,),
            "has_embedding": False,
            "has_head": True,
            **sizes,
        }
    )


def costs_of(
    of: ModelShape, stage: StageShape, nodes: Cluster = NODES, **options: Any
) -> PartCosts:
    return stage_costs(
        nodes,
        stage,
        model=of,
        profile=analytic_profile(of, nodes),
        options=TrainingOptions(**options),
    )


STAGES = [
    last_stage(),
    last_stage(tensor=4),
    last_stage(tensor=4, sequence_parallel=True, recompute="full"),
    last_stage(context=4, recompute="selective"),
    last_stage(fp8=Fp8(format="hybrid")),
]
SHARED_EXPERTS = last_stage(
    layers=(8,), sparse_layers=(8,), data=8, experts=8, tensor=2, sequence_parallel=True
)


@pytest.mark.parametrize(
    ("of", "stage"),
    [*((LLAMA, stage) for stage in STAGES), (model(DEEPSEEK_LIKE), SHARED_EXPERTS)],
)
def test_costs_of_the_head_grow_alike_with_every_mtp_layer_and_no_others_do(
    of: ModelShape, stage: StageShape
) -> None:
    none, one, two = (costs_of(predicting(of, count), stage) for count in range(3))
    for times in ("forward", "backward"):
        each = getattr(one.head, times) - getattr(none.head, times)
        assert each > getattr(none.head, times) + getattr(none.embedding, times)
        assert getattr(two.head, times) - getattr(one.head, times) == pytest.approx(each)
    for name in ("head_activation_bytes", "head_delayed_bytes"):
        each = getattr(one, name) - getattr(none, name)
        assert each > 0
        assert getattr(two, name) - getattr(one, name) == pytest.approx(each)
    assert two.head_working_bytes == one.head_working_bytes
    grown = {"head", "head_activation_bytes", "head_delayed_bytes", "head_working_bytes"}
    assert {name for name, cost in vars(two).items() if cost != getattr(none, name)} <= grown


def test_an_mtp_layer_takes_a_layer_a_head_an_embedding_and_a_part_of_a_layer() -> None:
    """As in a profile that was measured without it: a sixth of a layer's weights, and attention."""
    measured = profile()
    parts = {"embedding": PassTimes(0.001, 0.003), "head": PassTimes(0.004, 0.006)}
    accelerators = {
        name: replace(
            part, points={at: replace(costs, **parts) for at, costs in part.points.items()}
        )
        for name, part in measured.accelerators.items()
    }
    costs = stage_costs(
        cluster(),
        last_stage(),
        model=predicting(MODEL, 2),
        profile=MeasuredProfile(accelerators),
        options=TrainingOptions(),
    )
    part = 4 * MODEL.seq_length * MODEL.hidden**2 / MODEL.layer_flops
    assert part == pytest.approx(1 / 6 / (1 + 2048 / 12 / 1024))
    assert costs.head.forward == pytest.approx(0.004 + 2 * (0.004 + 0.001 + 0.01 * (1 + part)))
    assert costs.head.backward == pytest.approx(0.006 + 2 * (0.006 + 0.003 + 0.02 * (1 + part)))


@pytest.mark.parametrize(("is_shared", "forward", "backward"), [(False, 1, 4), (True, 3, 5)])
def test_tensor_parallel_ranks_gather_what_the_projection_takes_and_gives(
    is_shared: bool, forward: int, backward: int
) -> None:
    """Times a gather of a hidden state, beside the same part of the layer as on one rank."""
    stage = last_stage(tensor=4, sequence_parallel=is_shared)
    none, one = (costs_of(predicting(LLAMA, count), stage) for count in range(2))
    part = LLAMA.hidden**2 * 4 * LLAMA.seq_length / LLAMA.layer_flops
    gather = 3 * (4096 * 4096 * 2 / 4 / 450e9 + 10e-6)
    for times, count in (("forward", forward), ("backward", backward)):
        layer, embedding, head = (
            getattr(part, times) for part in (none.layer, none.embedding, none.head)
        )
        added = getattr(one.head, times) - 2 * head - embedding - (1 + part) * layer
        assert added == pytest.approx(count * gather, rel=1e-3)


def test_each_mtp_layer_keeps_what_its_loss_needs_of_the_logits_but_not_the_logits() -> None:
    """4 bytes of each, for all MTP layers at once, and 2 bytes of one layer's."""
    none, two = (costs_of(predicting(LLAMA, count), last_stage()) for count in (0, 2))
    logits, hidden = 4096 * LLAMA.vocabulary, 4096 * 4096 * 2
    assert none.head_activation_bytes == 6 * logits + 2 * hidden
    each = (two.head_activation_bytes - none.head_activation_bytes) / 2
    assert each == 4 * logits + none.layer_activation_bytes + (2 + 3) * hidden


def test_recomputed_mtp_layers_keep_their_embedding_and_the_output_layer_s_inputs() -> None:
    stage = last_stage(recompute="full")
    none, one = (costs_of(predicting(LLAMA, count), stage) for count in range(2))
    logits, hidden = 4096 * LLAMA.vocabulary, 4096 * 4096 * 2
    kept = one.head_activation_bytes - none.head_activation_bytes
    assert kept == 4 * logits + (1 + 2) * hidden
    assert one.head_working_bytes == none.layer_working_bytes + 3 * hidden
    # The method `block` recomputes layers and leaves these out.
    left_out = costs_of(predicting(LLAMA, 1), stage, recomputes_mtp_layers=False)
    stored = costs_of(predicting(LLAMA, 1), last_stage())
    assert left_out.layer == one.layer
    assert left_out.head == stored.head
    assert left_out.head.backward < one.head.backward
    assert left_out.head_activation_bytes == stored.head_activation_bytes


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, True),
        ({"recompute_method": "uniform"}, True),
        ({"recompute-method": "block"}, False),
    ],
)
def test_flags_say_whether_mtp_layers_are_recomputed(flags: dict[str, Any], expected: bool) -> None:
    assert TrainingOptions.of_flags(flags).recomputes_mtp_layers is expected


def priced(of: ModelShape, placement: Placement) -> StepCosts:
    return step_costs(placement, model=of, cluster=cluster(), profile=profile())


def test_the_last_stage_has_a_copy_of_the_embedding_and_exchanges_its_gradient() -> None:
    rows = MODEL.vocabulary * MODEL.hidden
    without, one, two = (priced(predicting(MODEL, count), mixed()) for count in range(3))
    each = MODEL.layer_parameters + 2 * MODEL.hidden**2 + 3 * MODEL.hidden
    weights = [stages.memory[0][-1].weights / 2 for stages in (without, one, two)]
    assert weights[1] - weights[0] == rows + each
    assert weights[2] - weights[1] == each
    assert without.memory[0][0] == two.memory[0][0]
    assert one.reduce[0] - without.reduce[0] == pytest.approx(rows * 4 / 50e9 + 15e-6)
    # A tied output layer shares the copy, and one stage has none.
    tied = [replace(MODEL, tied=True, mtp_layers=count) for count in range(2)]
    before, after = (priced(of, mixed()).memory[0][-1].weights / 2 for of in tied)
    assert after - before == each
    before, after = (priced(predicting(MODEL, count), alone()) for count in range(2))
    assert (after.memory[0][0].weights - before.memory[0][0].weights) / 2 == each


def test_ranks_share_the_experts_of_an_mtp_layer_as_those_of_the_last_layer() -> None:
    of = model(DEEPSEEK_LIKE)
    none, one = (SHARED_EXPERTS.expert_parameters(predicting(of, count)) for count in range(2))
    assert one - none == of.expert_parameters / 16
    # A model that ends with a dense layer has dense MTP layers.
    dense_last = predicting(model(DEEPSEEK_LIKE, moe_layer_freq="[1]*26+[0]"), 1)
    assert not dense_last.mtp_is_sparse
    assert SHARED_EXPERTS.expert_parameters(dense_last) == none


def test_linear_layers_of_mtp_layers_are_in_fp8_whichever_others_stay_in_bf16() -> None:
    fp8 = Fp8(format="hybrid", bf16_at_end=1)
    stage = last_stage(fp8=fp8, bf16_layers=((1, 0),))
    none, one = (stage.fp8_weight_bytes(predicting(LLAMA, count)) for count in range(2))
    each = LLAMA.layer_matrix_parameters + 2 * LLAMA.hidden**2
    assert one - none == WEIGHT_COPIES * each
    odd = replace(LLAMA, hidden=48 * 4, heads=16, query_groups=16, head_size=64, ffn=1024)
    assert divides(odd, tensor=8, rows=4096)
    assert not divides(predicting(odd, 1), tensor=8, rows=4096)


def test_the_memory_of_a_plan_without_a_cluster_is_the_same() -> None:
    of, mesh = predicting(LLAMA, 1), Mesh("nvidia", 2, micro_batch_size=1, recompute="full")
    plan = Plan((mesh,), ((16,), (16,)))
    for recomputes in (True, False):
        options = TrainingOptions(recomputes_mtp_layers=recomputes)
        costs = step_costs(
            Placement(plan, ("H100-SXM",), 8),
            model=of,
            cluster=NODES,
            profile=analytic_profile(of, NODES),
            options=options,
        )
        found = stage_memory(plan, 1, of, micro_batches=8, options=options)
        assert found.memory == costs.memory[0][1]
