"""Factors of matrices in fp8: those of experts, and how delayed ones follow from maxima."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hetero.planner.fp8 import Fp8
from hetero.planner.model_shape import model_from_flags
from hetero.planner.stage_shape import StageShape
from megatron.hetero import fp8, grouped_experts
from megatron.hetero.fp8_operands import (
    DELAYED,
    GRADIENT,
    INPUT,
    ROWWISE,
    TENSORWISE,
    WEIGHT,
    Types,
    multiplies_groups,
)
from megatron.hetero.fp8_scaling import GroupedScaling, Histories, LayerScaling
from tests.gpus import NEEDS_A_GPU
from tests.megatron.fp8_cases import (
    CPU,
    EXPERTS,
    OUTPUTS,
    SCALINGS,
    TOKENS,
    TYPES,
    WIDTH,
    Delayed,
    backward,
    decibels,
    grouped_linear,
    matrices,
    recipe,
)

# Experts, whose matrices are multiplied together.

SPLITS = {
    "of-every-expert": (16, 20, 3, 25),
    "of-some-experts": (0, 30, 0, 34),
    "of-one-expert": (0, 0, TOKENS, 0),
}


def expert_matrices(
    device: torch.device = CPU,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, the weights of experts of different magnitude, and output gradient, bf16."""
    x, weight, grad = (each.detach() for each in matrices(device))
    return x, torch.stack([weight * 4**expert for expert in range(EXPERTS)]), grad


def ends_of(counts: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0, dtype=torch.int32)


def looped(rows: torch.Tensor, weight: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
    """Float64: the rows of each expert times its own (experts, k, n)."""
    parts = zip(rows.double().split(counts), weight.double(), strict=True)
    return torch.cat([part @ own for part, own in parts])


@pytest.mark.parametrize("counts", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_grouped_products_are_close_to_those_in_float64(
    types: Types, scaling: str, counts: tuple[int, ...]
) -> None:
    """Output gradients are in e4m3 whatever the recipe says: torch multiplies no others."""
    x, weight, grad = expert_matrices()
    layer = GroupedScaling("fc1", recipe(types, scaling))
    ends = ends_of(counts)
    output = layer.forward(x, weight, ends, records=True)
    grad_input = layer.input_gradient(grad, weight, ends, records=True)
    assert output.dtype == grad_input.dtype == torch.bfloat16
    assert decibels(output, looped(x, weight.mT, counts)) > 25
    assert decibels(grad_input, looped(grad, weight, counts)) > 25
    assert layer.products == {"forward": 1, "input_gradient": 1, "weight_gradient": 0}


def test_a_rank_without_tokens_counts_its_products_and_learns_no_maximum() -> None:
    delayed = DelayedExperts()
    _, weight, _ = expert_matrices()
    ends = ends_of((0,) * EXPERTS)
    empty = torch.zeros(0, WIDTH, dtype=torch.bfloat16)
    assert delayed.layer.forward(empty, weight, ends, records=True).shape == (0, OUTPUTS)
    none = empty.new_zeros(0, OUTPUTS)
    assert delayed.layer.input_gradient(none, weight, ends, records=True).shape == (0, WIDTH)
    delayed.layers.end_step()
    assert delayed.maxima.tolist() == [[0.0, float(weight.abs().max()), 0.0]]
    delayed.layers.require_products(rank="rank 3")


@pytest.mark.parametrize("scaling", [TENSORWISE, ROWWISE])
def test_a_factor_of_each_expert_does_not_depend_on_the_others(scaling: str) -> None:
    """So that weights are cast alike whatever the number of ranks that share the experts."""
    _, weight, _ = expert_matrices()
    own = recipe(TYPES["fn"], scaling)
    together = GroupedScaling("fc1", own).weight(weight)
    alone = [GroupedScaling("fc1", own).weight(one.unsqueeze(0)) for one in weight]
    for place, operand in enumerate(together):
        for part in ("values", "inverse"):
            parts = [getattr(each[place], part).float() for each in alone]
            assert torch.equal(getattr(operand, part).float(), torch.cat(parts))


def test_the_planner_counts_what_experts_keep_to_the_byte() -> None:
    """Weights of the rank's own experts in both orders, and inputs in bf16."""
    model = model_from_flags(
        {
            "num-layers": 1,
            "hidden-size": WIDTH,
            "ffn-hidden-size": OUTPUTS,
            "num-attention-heads": 1,
            "seq-length": 64,
            "padded-vocab-size": 64,
            "num-experts": 2 * EXPERTS,
            "moe-ffn-hidden-size": 2 * OUTPUTS,
        },
        source="the test",
    )
    stage = StageShape(
        kind="X",
        layers=(1,),
        sparse_layers=(1,),
        has_embedding=False,
        has_head=False,
        tensor=2,
        data=2,
        experts=2,
        fp8=Fp8(format="hybrid", recipe=TENSORWISE),
    )
    with_experts, without = (
        one.fp8_weight_bytes(model)
        for one in (stage, replace(stage, fp8=replace(stage.fp8, experts=False)))
    )
    x, weight, _ = expert_matrices()
    rows, kept = ends_of(SPLITS["of-some-experts"]), 0
    for matrix in (weight, weight.mT.contiguous()):
        layer = GroupedScaling("fc", recipe(TYPES["fn"], TENSORWISE))
        kept += sum(operand.values.nbytes for operand in layer.weight(matrix))
    assert with_experts - without == kept

    linear = grouped_linear()
    linear.products = GroupedScaling("fc1", recipe(TYPES["fn"], TENSORWISE))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(x, rows)
    assert [t.dtype for t in saved] == [torch.bfloat16, torch.int32]
    assert saved[0].data_ptr() == x.data_ptr()


class DelayedExperts:
    """A linear layer of experts with delayed scales."""

    def __init__(self) -> None:
        self.module = grouped_linear()
        name = "decoder.layers.0.mlp.experts.linear_fc1"
        alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        self.layers = fp8.Fp8Layers(
            [(name, self.module)],
            recipe(TYPES["fn"], DELAYED),
            group=alone,  # type: ignore[arg-type]
            device=CPU,
        )
        (self.layer,) = self.layers._layers
        self.maxima: torch.Tensor = self.module.fp8_amax_history  # type: ignore[assignment]


def test_delayed_scaling_has_one_maximum_for_all_experts_of_a_layer() -> None:
    """It is agreed over the ranks that share them, and holds for any number of those."""
    delayed = DelayedExperts()
    x, weight, grad = expert_matrices()
    ends = ends_of(SPLITS["of-every-expert"])
    with torch.no_grad():
        delayed.module.weight.copy_(weight)
    for _ in range(2):
        output = delayed.module(x.clone().requires_grad_(), ends)
        output.backward(grad)
        delayed.layers.end_step()
        delayed.layers.weights_changed()
    largest = [float(each.abs().max()) for each in (x, weight, grad)]
    assert delayed.maxima.tolist() == [largest]
    own, turned = delayed.layer.weight(weight)
    assert turned is not None
    for operand in (own, turned):
        assert operand.inverse.unique().tolist() == pytest.approx([largest[1] / 448])
    gradients = delayed.layer.operands(GRADIENT, grad)[0]
    assert gradients.values.dtype == torch.float8_e4m3fn
    assert float(gradients.values.float().abs().max()) == 448


def test_weights_of_experts_are_cast_once_until_they_have_changed() -> None:
    delayed = DelayedExperts()
    x, weight, _ = expert_matrices()
    ends = ends_of(SPLITS["of-every-expert"])
    before = delayed.layer.forward(x, weight, ends, records=False)
    changed = weight * 2
    assert torch.equal(delayed.layer.forward(x, changed, ends, records=False), before)
    delayed.layers.weights_changed()
    assert torch.equal(delayed.layer.forward(x, changed, ends, records=False), 2 * before)


def test_weight_gradients_of_experts_are_those_of_bf16() -> None:
    x, weight, grad = expert_matrices()
    ends = ends_of(SPLITS["of-some-experts"])
    found = []
    for scaled in (True, False):
        module = DelayedExperts().module
        if not scaled:
            module.products = grouped_experts._OwnDtype()
        with torch.no_grad():
            module.weight.copy_(weight)
        module(x.clone().requires_grad_(), ends).backward(grad)
        assert module.weight.grad is not None
        found.append(module.weight.grad)
    assert torch.equal(*found)


def test_what_is_not_finite_stays_so_in_the_row_of_its_token() -> None:
    x, weight, _ = expert_matrices()
    x[3, 5] = math.inf
    layer = GroupedScaling("fc1", recipe(TYPES["fn"], ROWWISE))
    output = layer.forward(x, weight, ends_of(SPLITS["of-every-expert"]), records=True)
    assert output[3].isnan().all()
    assert output[torch.arange(TOKENS) != 3].isfinite().all()


# Delayed scales.


def test_the_first_step_is_scaled_by_its_own_maxima() -> None:
    operand = Delayed().step(2.0, -4.0)
    assert operand.values.float().tolist() == [[224.0, -448.0]]
    assert float(operand.inverse) == pytest.approx(4 / 448)


def test_later_steps_are_scaled_by_the_maximum_of_the_last_one() -> None:
    delayed = Delayed()
    delayed.step(4.0)
    assert delayed.step(2.0).values.float().tolist() == [[224.0]]
    assert delayed.step(2.0).values.float().tolist() == [[448.0]]


def test_the_largest_of_the_maxima_that_are_kept_counts() -> None:
    delayed = Delayed(history=3, takes_most_recent=False)
    found = [float(delayed.step(value).inverse) * 448 for value in (4.0, 8.0, 1.0, 1.0, 1.0, 2.0)]
    assert found == pytest.approx([4, 4, 8, 8, 8, 1])
    assert delayed.maxima[:, INPUT].tolist() == [1.0, 1.0, 2.0]


def test_the_margin_leaves_powers_of_two_free() -> None:
    delayed = Delayed(margin=2)
    delayed.step(1.0)
    assert delayed.step(1.0).values.float().tolist() == [[448 / 4]]


def test_each_matrix_of_a_layer_has_a_scale_of_its_own_in_its_own_type() -> None:
    delayed = Delayed()
    delayed.see(1.0, role=INPUT)
    delayed.see(2.0, role=WEIGHT)
    delayed.step(4.0, role=GRADIENT)
    assert delayed.maxima.tolist() == [[1.0, 2.0, 4.0]]
    assert delayed.see(4.0, role=GRADIENT).values.dtype == torch.float8_e5m2
    assert float(delayed.see(4.0, role=GRADIENT).values) == torch.finfo(torch.float8_e5m2).max


def test_the_maximum_of_a_step_is_that_of_all_its_micro_batches() -> None:
    delayed = Delayed()
    for value in (1.0, 16.0, 2.0):
        delayed.see(value)
    delayed.layers.end_step()
    assert delayed.maxima[:, INPUT].tolist() == [16.0]


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan], ids=str)
def test_zeros_and_what_is_not_finite_leave_the_last_maximum(value: float) -> None:
    delayed = Delayed(history=2)
    delayed.step(4.0)
    delayed.step(value)
    assert delayed.maxima[:, INPUT].tolist() == [4.0, 4.0]
    assert float(delayed.layers.take_clipped()) == 0


def test_what_a_scale_does_not_reach_is_clipped_and_counted_once() -> None:
    delayed = Delayed(margin=1)
    delayed.step(1.0)
    assert delayed.step(2.0).values.float().tolist() == [[448.0]]
    assert float(delayed.layers.take_clipped()) == 0
    assert delayed.step(-64.0, 1.0).values.float().tolist() == [[-448.0, 112.0]]
    assert float(delayed.layers.take_clipped()) == 1
    assert float(delayed.layers.take_clipped()) == 0


def test_one_huge_value_costs_the_others_nothing_before_its_scale_is_known() -> None:
    """It is clipped and counted; in the next step all others are zeros."""
    delayed = Delayed()
    delayed.step(4.0)
    assert delayed.step(1e8, 2.0).values.float().tolist() == [[448.0, 224.0]]
    assert float(delayed.layers.take_clipped()) == 1
    assert delayed.step(1e8, 2.0).values.float().tolist() == [[448.0, 0.0]]
    assert float(delayed.layers.take_clipped()) == 0


def test_an_infinite_element_is_nan_under_a_scale_that_is_known() -> None:
    delayed = Delayed()
    delayed.step(4.0)
    first, second = delayed.step(math.inf, 2.0).values.float()[0]
    assert first.isnan()
    assert second == 224.0


def test_evaluation_leaves_no_maximum_of_inputs() -> None:
    delayed = Delayed()
    x, weight, _ = matrices()
    fp8.linear(delayed.layer, x, weight, None, training=False)
    delayed.layers.end_step()
    assert delayed.maxima[0, INPUT] == 0
    assert delayed.maxima[0, WEIGHT] == weight.abs().max()


def test_maxima_that_are_loaded_scale_the_first_step() -> None:
    delayed = Delayed()
    delayed.see(1000.0)
    delayed.maxima.copy_(torch.tensor([[8.0, 0.0, 0.0]]))
    delayed.layers.restart()
    assert float(delayed.see(1.0).values) == 56.0
    delayed.layers.end_step()
    assert delayed.maxima[:, INPUT].tolist() == [1.0]


def test_a_layer_of_which_no_maxima_are_loaded_is_scaled_by_its_own_at_first() -> None:
    """A checkpoint may be of a run that had fewer layers in fp8."""
    delayed = Delayed(layers=2)
    delayed.maxima.copy_(torch.tensor([[8.0, 4.0, 2.0]]))
    delayed.layers.restart()
    first, second = delayed.layers._layers
    x = torch.tensor([[2.0]], dtype=torch.bfloat16)
    assert float(first.operands(INPUT, x)[0].values) == 448 * 2 / 8
    assert float(second.operands(INPUT, x)[0].values) == 448
    delayed.layers.end_step()
    assert float(second.operands(INPUT, x / 2)[0].values) == 448 / 2


def test_a_weight_is_cast_once_until_it_has_changed() -> None:
    x, weight, grad = matrices()
    layer = LayerScaling("fc1", recipe(TYPES["fn"]))
    before = backward(layer, grad, x, weight)
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(backward(layer, grad, x, weight), before)
    layer.forget_weight()
    assert torch.equal(backward(layer, grad, x, weight), 2 * before)


# Kernels of GPUs.


@pytest.mark.gpu
@NEEDS_A_GPU
@pytest.mark.parametrize("counts", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_grouped_products_of_a_gpu_are_those_of_a_cpu(
    scaling: str, counts: tuple[int, ...]
) -> None:
    device = torch.device("cuda")
    own = recipe(Types.of(device, "nvidia"), scaling)
    if not multiplies_groups(device, own):
        pytest.skip("torch has no grouped products in fp8 for this GPU")
    found = []
    for place in (device, CPU):
        x, weight, grad = (each.to(place) for each in expert_matrices())
        layer = GroupedScaling("fc1", own)
        ends = ends_of(counts).to(place)
        output = layer.forward(x, weight, ends, records=True)
        grad_input = layer.input_gradient(grad, weight, ends, records=True)
        found.append((output.cpu(), grad_input.cpu()))
    for mine, reference in zip(*found, strict=True):
        assert decibels(mine, reference) > 40


@pytest.mark.gpu
@NEEDS_A_GPU
@pytest.mark.parametrize("scaling", SCALINGS)
def test_grouped_products_of_a_gpu_wait_for_nothing(scaling: str) -> None:
    """The numbers of tokens stay on the device; in the second step, when kernels are compiled."""
    device = torch.device("cuda")
    own = recipe(Types.of(device, "nvidia"), scaling)
    if not multiplies_groups(device, own):
        pytest.skip("torch has no grouped products in fp8 for this GPU")
    x, weight, grad = expert_matrices(device)
    layer = GroupedScaling("fc1", own)
    ends = ends_of(SPLITS["of-some-experts"]).to(device)
    for mode in ("default", "error"):
        layer.forget_weight()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            layer.forward(x, weight, ends, records=True)
            layer.input_gradient(grad, weight, ends, records=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@NEEDS_A_GPU
def test_every_layer_of_a_gpu_multiplies_by_its_delayed_scales() -> None:
    device = torch.device("cuda")
    own = recipe(Types.of(device, "nvidia"), DELAYED)
    layers = [LayerScaling(f"fc{number}", own) for number in range(3)]
    histories = Histories(layers, own, device)
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    for _ in range(2):
        for layer in layers:
            x, weight, grad = matrices(device)
            output = backward(layer, grad, x, weight)
            assert x.grad is not None
            assert decibels(output, x.double() @ weight.double().t()) > 25
            assert decibels(x.grad, grad.double() @ weight.double()) > 22
        histories.end_step(alone)  # type: ignore[arg-type]
    assert all(histories.is_known)
