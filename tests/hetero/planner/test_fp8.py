"""What fp8 saves and costs in a plan: products, casts, memory, and the layers that stay in bf16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetero.errors import UserError
from hetero.plan import Mesh, Plan
from hetero.planner.accelerators import Accelerator, built_in_accelerators
from hetero.planner.analytic_profile import EFFICIENCY, AnalyticProfile, measured_efficiency
from hetero.planner.cluster_shape import cluster_from_mapping
from hetero.planner.fp8 import (
    BF16,
    Fp8,
    cast_bytes,
    divides,
    expert_flops_as_in_bf16,
    flops_as_in_bf16,
    linear_parameters,
)
from hetero.planner.layer_profile import (
    AcceleratorProfile,
    MeasuredProfile,
    PartCosts,
    Point,
    ProfileError,
)
from hetero.planner.model_shape import load_model, model_from_flags
from hetero.planner.placement import Placement
from hetero.planner.plan_memory import stage_memory
from hetero.planner.search_space import Problem, SearchSpace
from hetero.planner.solution import find_best_plans
from hetero.planner.stage_costs import stage_costs
from hetero.planner.stage_shape import StageShape, pipeline_stages
from hetero.planner.step_costs import StepCosts, step_costs
from hetero.planner.training_options import TrainingOptions
from tests.hetero.planner.expert_models import QWEN3_30B

MODEL = load_model("llama3-8b", seq_length=4096)
PARTS = dict(built_in_accelerators())
ANALYTIC = AnalyticProfile(MODEL, PARTS)
QWEN = model_from_flags(QWEN3_30B, source="the test")
POINT = Point(1, 1, 4096)
FP8 = Fp8(format="hybrid", recipe="tensorwise")


def in_fp8(point: Point = POINT, recipe: str = "tensorwise") -> Point:
    return replace(point, fp8=recipe)


def cluster(*names: str) -> dict[str, object]:
    return {"nodes": [{"accelerator": name, "gpus_per_node": 2} for name in names]}


def costs_of(fp8: Fp8, layers: tuple[int, ...], *meshes: str | None) -> StepCosts:
    """A step on H100s, a mesh a stage; `meshes` are what each says of fp8."""
    plan = Plan(
        tuple(Mesh("nvidia", 1, micro_batch_size=1, fp8=own) for own in meshes),
        tuple((count,) for count in layers),
    )
    nodes = cluster_from_mapping(
        {"nodes": [{"accelerator": "H100-SXM", "gpus_per_node": 4}]}, source="the test"
    )
    placement = Placement(plan, ("H100-SXM",) * len(meshes), 8)
    options = TrainingOptions(fp8=fp8)
    return step_costs(placement, model=MODEL, cluster=nodes, profile=ANALYTIC, options=options)


@pytest.mark.parametrize("name", ["H100-SXM", "MI300X", "MI325X", "L40S", "B200"])
def test_fp8_is_faster_and_less_than_twice_as_fast(name: str) -> None:
    bf16, fp8 = (ANALYTIC.costs(name, one).layer for one in (POINT, in_fp8()))
    assert 0.5 < fp8.forward / bf16.forward < 1.0
    assert 0.5 < fp8.backward / bf16.backward < 1.0


@pytest.mark.parametrize("name", ["V100-SXM2-32GB", "A100-SXM4-80GB", "MI210", "MI250X"])
def test_older_gpus_have_no_fp8(name: str) -> None:
    assert PARTS[name].fp8_flops is None


def test_embedding_and_output_layer_cost_what_they_do_in_bf16() -> None:
    bf16, fp8 = (ANALYTIC.costs("H100-SXM", one) for one in (POINT, in_fp8()))
    assert (bf16.head, bf16.embedding) == (fp8.head, fp8.embedding)
    assert bf16.head_activation_bytes == fp8.head_activation_bytes


def test_delayed_scaling_saves_a_pass_over_each_tensor_and_rowwise_costs_more() -> None:
    delayed, tensorwise, rowwise = (
        ANALYTIC.costs("H100-SXM", in_fp8(recipe=recipe)).layer.forward
        for recipe in ("delayed", "tensorwise", "rowwise")
    )
    assert delayed < tensorwise < rowwise


def test_weight_gradients_in_bf16_take_longer() -> None:
    whole = ANALYTIC.costs("H100-SXM", in_fp8())
    part = ANALYTIC.costs("H100-SXM", replace(in_fp8(), fp8_weight_gradients=False))
    assert part.layer.backward > whole.layer.backward
    assert part.layer.forward < whole.layer.forward, "no input is cast in both orders"
    in_bf16 = ANALYTIC.costs("H100-SXM", POINT)
    assert part.layer_activation_bytes == in_bf16.layer_activation_bytes


@pytest.mark.parametrize(("recipe", "both", "one"), [("delayed", 4, 3), ("tensorwise", 6, 5)])
def test_a_cast_reads_two_bytes_and_writes_one_in_each_order(
    recipe: str, both: int, one: int
) -> None:
    assert cast_bytes(recipe, transposed=True) == both
    assert cast_bytes(recipe, transposed=False) == one


def test_a_layer_keeps_its_inputs_in_one_byte() -> None:
    """Of the inputs of four linear layers attention keeps its output in bf16 as well."""
    kept = [ANALYTIC.costs("H100-SXM", one).layer_activation_bytes for one in (POINT, in_fp8())]
    saved = 2 * MODEL.hidden + MODEL.ffn - MODEL.output_width
    assert kept[0] - kept[1] == 4096 * saved


def test_what_sequence_parallelism_gathers_is_kept_in_bf16() -> None:
    shared = replace(POINT, tensor=4, sequence_parallel=True)
    kept = [ANALYTIC.costs("H100-SXM", p).layer_activation_bytes for p in (shared, in_fp8(shared))]
    assert kept[0] - kept[1] == 4096 * (MODEL.ffn - MODEL.output_width) / 4


def test_what_waits_for_delayed_weight_gradients_is_half_as_large() -> None:
    bf16, fp8 = (ANALYTIC.costs("H100-SXM", one) for one in (POINT, in_fp8()))
    assert fp8.layer_delayed_bytes == bf16.layer_delayed_bytes / 2


def test_both_orders_of_each_weight_are_kept() -> None:
    plan = Plan((Mesh("nvidia", 2, tensor=2, micro_batch_size=1),), layers=((16,), (16,)))
    bf16, fp8 = (
        stage_memory(plan, 0, MODEL, micro_batches=8, options=TrainingOptions(fp8=own)).memory
        for own in (BF16, FP8)
    )
    assert fp8.weights - bf16.weights == 16 * 2 * MODEL.layer_matrix_parameters / 2
    assert fp8.activations < bf16.activations


def sparse_costs(name: str, *, tensor: int = 1) -> list[PartCosts]:
    """In bf16 and in fp8."""
    point = Point(tensor, 4, QWEN.seq_length, sequence_parallel=tensor > 1)
    profile = AnalyticProfile(QWEN, PARTS)
    return [profile.costs(name, one) for one in (point, in_fp8(point))]


def without_grouped(name: str) -> Accelerator:
    """The same GPU, if torch had no grouped product in fp8 for it."""
    return replace(PARTS[name], has_fp8_grouped_mm=False)


def test_routers_stay_in_bf16() -> None:
    assert QWEN.shared_ffn == 0
    assert linear_parameters(QWEN, sparse=True) == (
        QWEN.layer_matrix_parameters - 3 * QWEN.hidden * QWEN.ffn
    )


def test_experts_stay_in_bf16_where_a_gpu_has_no_grouped_product_in_fp8() -> None:
    bf16, fp8 = sparse_costs("L40S")
    assert bf16.experts_at_least == fp8.experts_at_least
    saved = bf16.sparse_layer.forward - fp8.sparse_layer.forward
    attention = 2.0 * 4 * QWEN.seq_length * linear_parameters(QWEN, sparse=True)
    part = PARTS["L40S"]
    assert 0 < saved < attention / (part.matmul_flops * EFFICIENCY) / 2


def test_two_of_three_products_of_experts_are_faster_by_as_much_as_others() -> None:
    """Beside them, rows are cast in one order: inputs, and output gradients."""
    part, point = PARTS["H100-SXM"], in_fp8(Point(1, 4, QWEN.seq_length))
    own, others = (
        AnalyticProfile(QWEN, {"H100-SXM": one}).costs("H100-SXM", point).sparse_layer
        for one in (part, without_grouped("H100-SXM"))
    )
    tokens = 4 * QWEN.seq_length
    product = 4 * QWEN.expert_flops / (part.matmul_flops * EFFICIENCY)
    saved = product * (1 - part.matmul_flops / part.fp8_matmul_flops)
    cast = 5 * tokens * QWEN.experts_per_token / part.memory_bandwidth
    inputs, gradients = (cast * (QWEN.hidden + n * QWEN.expert_ffn) for n in (1, 2))
    assert others.forward - own.forward == pytest.approx(saved - inputs)
    assert others.backward - own.backward == pytest.approx(saved - gradients)


def test_experts_in_fp8_wait_for_half_the_bytes_and_not_for_one_start_each() -> None:
    bf16, fp8 = sparse_costs("H100-SXM")
    assert fp8.experts_at_least.forward == bf16.experts_at_least.forward / 2
    bf16, fp8 = sparse_costs("MI300X")
    read = QWEN.expert_parameters / PARTS["MI300X"].memory_bandwidth
    assert fp8.experts_at_least.forward == pytest.approx(read)
    assert bf16.experts_at_least.forward > 10 * read


@pytest.mark.parametrize("tensor", [1, 4])
def test_what_experts_keep_stays_in_bf16(tensor: int) -> None:
    """Without shared experts, what differs is attention's."""
    bf16, fp8 = sparse_costs("H100-SXM", tensor=tensor)
    tokens = 4 * QWEN.seq_length
    inputs = QWEN.hidden if tensor == 1 else 0
    more = QWEN.output_width / tensor - inputs
    kept = fp8.sparse_layer_activation_bytes - bf16.sparse_layer_activation_bytes
    assert kept == pytest.approx(tokens * more)
    temporary = fp8.sparse_layer_working_bytes - bf16.sparse_layer_working_bytes
    attention = 2 * max((QWEN.attention_width + QWEN.projected_width) / tensor, QWEN.hidden)
    row = max(QWEN.hidden, 2 * QWEN.expert_ffn / tensor)
    assert temporary == pytest.approx(tokens * (attention + QWEN.experts_per_token * row))


def test_experts_are_a_larger_part_of_a_layer_whose_attention_is_faster() -> None:
    part, experts_in_bf16 = PARTS["H100-SXM"], replace(FP8, experts=False)
    assert flops_as_in_bf16(QWEN, BF16, part, sparse=True) == QWEN.sparse_layer_flops
    attention = flops_as_in_bf16(QWEN, experts_in_bf16, part, sparse=True)
    assert QWEN.expert_flops < attention < QWEN.sparse_layer_flops
    assert expert_flops_as_in_bf16(QWEN, experts_in_bf16, part) == QWEN.expert_flops
    quicker = expert_flops_as_in_bf16(QWEN, FP8, part)
    assert QWEN.expert_flops / 3 < quicker < QWEN.expert_flops
    every = flops_as_in_bf16(QWEN, FP8, part, sparse=True)
    assert every == pytest.approx(attention - QWEN.expert_flops + quicker)


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({"data": 8}, 1),
        ({"data": 8, "experts": 8}, 8),
        ({"tensor": 4, "data": 4, "experts": 2}, 8),
        ({"tensor": 4, "data": 4, "experts": 4, "expert_tensor": 1}, 4),
    ],
)
def test_a_rank_keeps_and_casts_the_weights_of_its_own_experts(
    sizes: dict[str, Any], ranks: int
) -> None:
    tensor = sizes.get("tensor", 1)
    stage = StageShape(
        kind="H100-SXM",
        layers=(3,),
        sparse_layers=(3,),
        has_embedding=False,
        has_head=False,
        fp8=FP8,
        bf16_layers=((0, 1),),
        **sizes,
    )
    attention = 2 * linear_parameters(QWEN, sparse=True) / tensor
    experts = 2 * QWEN.expert_parameters / ranks
    assert stage.fp8_parameters(QWEN) == attention + experts
    assert stage.fp8_weight_bytes(QWEN) == 2 * (attention + experts)
    assert stage.weight_cast_bytes(QWEN) == 6 * (attention + experts)
    elsewhere = replace(stage, fp8=FP8.on(PARTS["L40S"]))
    assert elsewhere.fp8_weight_bytes(QWEN) == 2 * attention


@pytest.mark.parametrize(("name", "has_experts"), [("H100-SXM", True), ("L40S", False)])
def test_stages_of_a_plan_have_experts_in_fp8_where_their_gpus_can(
    name: str, has_experts: bool
) -> None:
    plan = Plan((Mesh("nvidia", 1, micro_batch_size=1),), ((QWEN.layers,),))
    nodes = cluster_from_mapping(cluster(name), source="the test")
    ((stage,),) = pipeline_stages(Placement(plan, (name,), 8), nodes, QWEN, fp8=FP8)
    assert stage.fp8.experts is has_experts


@pytest.mark.parametrize(("ranks", "expected"), [(1, True), (2, False), (None, True)])
def test_a_mesh_whose_experts_sixteen_does_not_divide_is_planned_in_bf16(
    ranks: int | None, expected: bool
) -> None:
    """But for GPUs on which experts stay in bf16 whatever their sides are."""
    model = replace(QWEN, expert_ffn=16)
    assert divides(model, tensor=2, rows=model.seq_length, ranks_per_expert=ranks) is expected


@pytest.mark.parametrize(("name", "expected"), [("H200", {"none"}), ("L40S", {None})])
def test_the_search_looks_at_the_sides_of_experts_that_are_in_fp8(
    name: str, expected: set[str | None]
) -> None:
    model = replace(QWEN, layers=2, sparse_pattern=(1, 1), expert_ffn=776)
    nodes = cluster_from_mapping(cluster(name), source="the test")
    space = SearchSpace(global_batch=16, tensor=(1,), micro_batch=(1,), replicas=False)
    profile = AnalyticProfile(model, PARTS)
    found = find_best_plans(Problem(nodes, model, profile, space, TrainingOptions(fp8=FP8)))
    assert found is not None
    assert {mesh.fp8 for mesh in found.first.placement.plan.meshes} == expected


def test_ranks_that_gather_fewer_rows_of_an_expert_cast_fewer() -> None:
    nodes = cluster_from_mapping(
        {"nodes": [{"accelerator": "H100-SXM", "gpus_per_node": 8}]}, source="the test"
    )
    # So long that kernels last longer than the host takes to start them.
    model = replace(QWEN, seq_length=2**17)
    profile = AnalyticProfile(model, PARTS)
    options = TrainingOptions(expert_dispatcher="alltoall", expert_imbalance=1.0, fp8=FP8)
    shape = StageShape(
        kind="H100-SXM",
        layers=(1,),
        sparse_layers=(1,),
        has_embedding=False,
        has_head=False,
        tensor=4,
        expert_tensor=1,
        sequence_parallel=True,
        fp8=FP8,
    )
    sliced = replace(shape, expert_tensor=4)
    (sliced_fp8, sliced_bf16), (whole_fp8, whole_bf16) = (
        [
            stage_costs(nodes, each, model=model, profile=profile, options=options)
            for each in (one, one.in_bf16())
        ]
        for one in (sliced, shape)
    )
    rows, hidden = model.seq_length / 4 * model.experts_per_token, model.hidden
    own_cast, sliced_cast = max(hidden, 2 * model.expert_ffn), 4 * hidden
    more = (whole_fp8.sparse_layer_working_bytes - whole_bf16.sparse_layer_working_bytes) - (
        sliced_fp8.sparse_layer_working_bytes - sliced_bf16.sparse_layer_working_bytes
    )
    assert more == pytest.approx(rows * (own_cast - sliced_cast))
    saved = 5 * rows * 3 * hidden / PARTS["H100-SXM"].memory_bandwidth
    for direction in ("forward", "backward"):
        in_fp8, in_bf16 = (
            getattr(one.sparse_layer, direction) - getattr(other.sparse_layer, direction)
            for one, other in ((sliced_fp8, whole_fp8), (sliced_bf16, whole_bf16))
        )
        assert in_fp8 - in_bf16 == pytest.approx(saved)


def test_a_mesh_without_fp8_costs_what_it_does_in_bf16() -> None:
    mixed = costs_of(FP8, (16, 16), None, "none")
    bf16 = costs_of(BF16, (16, 16), None, None)
    assert mixed.pipelines[0].forward[1] == bf16.pipelines[0].forward[1]
    assert mixed.memory[0][1] == bf16.memory[0][1]
    assert mixed.pipelines[0].forward[0] < bf16.pipelines[0].forward[0]


def test_first_and_last_layers_in_bf16_count_over_the_whole_model() -> None:
    """The first stage has two of them and no other, the second the third."""
    ends = replace(FP8, bf16_at_start=3, bf16_at_end=1)
    found, fp8, bf16 = (costs_of(own, (2, 15, 15), None, None, None) for own in (ends, FP8, BF16))
    bf16_layer, fp8_layer = (ANALYTIC.costs("H100-SXM", p).layer for p in (POINT, in_fp8()))
    for direction in ("forward", "backward"):
        more = getattr(bf16_layer, direction) - getattr(fp8_layer, direction)
        own, every = (getattr(costs.pipelines[0], direction) for costs in (found, fp8))
        assert [a[0] - b[0] for a, b in zip(own, every, strict=True)] == pytest.approx(
            [2 * more, more, more]
        )
    assert found.memory[0][0].weights == bf16.memory[0][0].weights
    copies = found.memory[0][1].weights - bf16.memory[0][1].weights
    assert copies == 14 * 2 * MODEL.layer_matrix_parameters


def test_weights_are_cast_once_a_step() -> None:
    bf16, fp8 = (costs_of(own, (16, 16), None, None).update[0][0] for own in (BF16, FP8))
    moved = 6 * 16 * MODEL.layer_matrix_parameters
    assert fp8 - bf16 == pytest.approx(moved / PARTS["H100-SXM"].memory_bandwidth)


def test_the_efficiency_is_found_again_in_a_profile_of_fp8() -> None:
    slow = AnalyticProfile(MODEL, PARTS, efficiency=0.42)
    points = [in_fp8(), in_fp8(replace(POINT, recompute="full")), POINT]
    measured = {point: slow.costs("H200", point) for point in points}
    profile = MeasuredProfile({"H200": AcceleratorProfile(measured, 1e-11)})
    assert measured_efficiency(profile, PARTS["H200"], MODEL) == pytest.approx(0.42)


@pytest.mark.parametrize(
    ("measured", "asked", "said"),
    [
        (POINT, in_fp8(), "measured without fp8, and layers in fp8 tensorwise are asked for"),
        (in_fp8(), POINT, "measured in fp8 tensorwise, and layers without fp8 are asked for"),
        (in_fp8(recipe="delayed"), in_fp8(), "in fp8 delayed, and layers in fp8 tensorwise"),
    ],
)
def test_a_profile_of_another_precision_is_refused(
    measured: Point, asked: Point, said: str
) -> None:
    costs = {measured: ANALYTIC.costs("H200", measured)}
    profile = MeasuredProfile({"H200": AcceleratorProfile(costs, 1e-11)})
    with pytest.raises(ProfileError, match=said):
        profile.costs("H200", asked)


def test_sizes_that_sixteen_does_not_divide_are_planned_in_bf16() -> None:
    assert divides(MODEL, tensor=8, rows=4096)
    assert not divides(MODEL, tensor=1, rows=1000)
    assert not divides(replace(MODEL, ffn=14336 // 16 * 16 + 8), tensor=1, rows=4096)
    assert not divides(replace(MODEL, ffn=48), tensor=2, rows=4096)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("H100-SXM", "MI300X"), {"nvidia": None, "amd": None}),
        (("H100-SXM", "MI250X"), {"nvidia": None, "amd": "none"}),
        (("MI210", "MI250X"), {"amd": "none"}),
    ],
)
def test_a_mesh_says_none_where_its_gpus_have_no_fp8(
    parts: tuple[str, ...], expected: dict[str, str | None]
) -> None:
    """The model fits on no kind alone but for MI300X."""
    nodes = cluster_from_mapping(cluster(*parts), source="the test")
    space = SearchSpace(global_batch=16, tensor=(1,), micro_batch=(1,), replicas=False)
    problem = Problem(nodes, MODEL, ANALYTIC, space, TrainingOptions(fp8=FP8))
    found = find_best_plans(problem)
    assert found is not None
    assert {m.vendor: m.fp8 for m in found.first.placement.plan.meshes} == expected


def test_replicas_of_gpus_with_and_without_fp8_are_all_in_bf16() -> None:
    """Flags say the same of all replicas."""
    nodes = cluster_from_mapping(cluster("L40S", "MI250X"), source="the test")
    model = load_model("llama3.2-1b", seq_length=2048)
    space = SearchSpace(global_batch=16, tensor=(1,), micro_batch=(1,), recompute=("none",))
    problem = Problem(nodes, model, AnalyticProfile(model, PARTS), space, TrainingOptions(fp8=FP8))
    found = find_best_plans(problem, runners_up=20)
    assert found is not None
    plans = [one.placement.plan for one in found.plans if one.placement.plan.whole_replicas]
    assert plans
    assert {mesh.fp8 for plan in plans for mesh in plan.meshes} == {"none"}


def test_flags_say_what_is_in_fp8() -> None:
    flags = {
        "fp8_format": "e4m3",
        "fp8_recipe": "rowwise",
        "fp8_wgrad": False,
        "first_last_layers_bf16": True,
        "num_layers_at_end_in_bf16": 3,
    }
    assert TrainingOptions.of_flags(flags).fp8 == Fp8(
        format="e4m3", recipe="rowwise", weight_gradients=False, bf16_at_start=1, bf16_at_end=3
    )
    assert TrainingOptions.of_flags({**flags, "fp8_format": None}).fp8 == BF16
    written = {"fp8-format": "hybrid", "no-fp8-wgrad": True, "num-layers-at-start-in-bf16": 4}
    assert Fp8.of_flags(written) == Fp8(format="hybrid", weight_gradients=False)


def test_flags_that_make_no_sense_are_refused_all_at_once() -> None:
    with pytest.raises(UserError) as caught:
        Fp8.of_flags(
            {
                "fp8-format": "e5m2",
                "fp8-recipe": "mxfp8",
                "first-last-layers-bf16": True,
                "num-layers-at-end-in-bf16": -1,
            }
        )
    assert len(caught.value.sentences) == 3
