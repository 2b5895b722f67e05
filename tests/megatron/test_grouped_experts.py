"""Experts computed together have the outputs and gradients of megatron-core's loop over them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.hetero import core_private, kernels
from megatron.hetero.cpu_shim import cpu_shim
from megatron.hetero.grouped_experts import GroupedExperts
from megatron.hetero.weights import global_name, named_parameters, part_of
from tests.gpus import NEEDS_A_GPU

EXPERTS, HIDDEN, WIDTH = 4, 16, 24
COUNTS = (5, 0, 1, 7)


@pytest.fixture(scope="module")
def groups() -> Iterator[ProcessGroupCollection]:
    with cpu_shim(), core_private.single_process_groups(1) as (_, found):
        yield found


def config(**changed: Any) -> TransformerConfig:
    shape: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "ffn_hidden_size": 40,
        "moe_ffn_hidden_size": WIDTH,
        "num_moe_experts": EXPERTS,
        "moe_grouped_gemm": True,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "expert_tensor_parallel_size": 1,
    }
    return TransformerConfig(**(shape | changed))


def both(
    groups: ProcessGroupCollection, own: TransformerConfig, *, fused: bool = False
) -> tuple[GroupedExperts, SequentialMLP]:
    """Ours and megatron-core's, with the same weights by global name.

    With `fused`, ours adds weight gradients to buffers.
    """
    accumulating = copy.copy(own)
    accumulating.gradient_accumulation_fusion = fused
    ours = GroupedExperts(EXPERTS, accumulating, pg_collection=groups)
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    theirs = SequentialMLP(EXPERTS, own, parts, pg_collection=groups)
    generator = torch.Generator().manual_seed(3)
    values = {
        f"experts.{name}": torch.randn(weight.shape, generator=generator).to(weight.dtype) * 0.3
        for name, weight in theirs.named_parameters()
    }
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            weight.copy_(values[f"experts.{name}"])
        named = dict(named_parameters([torch.nn.ModuleDict({"x": _Layer(ours)})], [0]))
        assert {name.removeprefix("x.mlp.") for name in named} == set(values)
        for name, weight in named.items():
            weight.copy_(values[name.removeprefix("x.mlp.")])
    return ours, theirs


class _Layer(torch.nn.Module):
    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = torch.nn.ModuleDict({"experts": experts})


def tokens(counts: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(sum(counts), HIDDEN, generator=generator).to(dtype)
    return rows.requires_grad_(), torch.rand(sum(counts), generator=generator).requires_grad_()


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By expert."""
    found = {}
    for name, weight in module.named_parameters():
        assert weight.grad is not None
        if "local_experts." in name:
            found[name] = weight.grad
        else:
            for expert, grad in enumerate(weight.grad):
                found[f"local_experts.{expert}.{name}"] = grad
    return found


CASES = {
    "swiglu": {},
    "gelu": {"gated_linear_unit": False, "activation_func": F.gelu},
    "biases": {"add_bias_linear": True},
    "activation-recomputed": {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe_act"],
    },
    "rows-that-no-grouped-kernel-takes": {"moe_ffn_hidden_size": 23},
}


@pytest.mark.parametrize("changed", CASES.values(), ids=CASES)
@pytest.mark.parametrize("counts", [COUNTS, (0, 0, 0, 0)], ids=["some", "none"])
def test_outputs_and_gradients_are_those_of_a_loop(
    changed: dict[str, Any], counts: tuple[int, ...], groups: ProcessGroupCollection
) -> None:
    ours, theirs = both(groups, config(**changed))
    outcomes = []
    for module in (ours, theirs):
        rows, probs = tokens(counts, torch.float32)
        # megatron-core adds biases in place to what its autograd does not let it change.
        if module is theirs and changed.get("add_bias_linear"):
            output = looped_with_biases(theirs, rows, counts, probs)
        else:
            output, bias = module(rows, torch.tensor(counts), probs)
            assert bias is None
        (output * torch.arange(HIDDEN)).sum().backward()
        outcomes.append((output, rows.grad, probs.grad))
    for mine, reference in zip(*outcomes, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)
    if sum(counts):
        mine, reference = gradients(ours), gradients(theirs)
        assert mine.keys() == reference.keys()
        for name, grad in mine.items():
            torch.testing.assert_close(grad, reference[name], rtol=1e-5, atol=1e-5)


def looped_with_biases(
    module: SequentialMLP, rows: torch.Tensor, counts: tuple[int, ...], probs: torch.Tensor
) -> torch.Tensor:
    outputs = []
    parts = zip(module.local_experts, rows.split(counts), probs.split(counts), strict=True)
    for expert, own, weights in parts:
        first, second = expert.linear_fc1, expert.linear_fc2
        gate, up = F.linear(own, first.weight, first.bias).chunk(2, dim=-1)
        outputs.append(
            F.linear(F.silu(gate) * up, second.weight, second.bias) * weights.unsqueeze(-1)
        )
    # The bias counts as much as the product: both are weighted.
    return torch.cat(outputs)


def test_a_part_of_a_stack_is_the_expert_it_names(groups: ProcessGroupCollection) -> None:
    ours = GroupedExperts(EXPERTS, config(), pg_collection=groups)
    named = dict(named_parameters([_Layer(ours)], [0], first_expert=8))
    part = named["mlp.experts.local_experts.10.linear_fc2.weight"]
    whole, begin = part_of(part)
    assert whole is ours.linear_fc2.weight
    assert begin == 2 * HIDDEN * WIDTH
    assert part.data_ptr() == ours.linear_fc2.weight[2].data_ptr()
    assert (part.tensor_model_parallel, part.partition_dim) == (True, 1)
    assert part_of(whole) == (whole, 0)
    assert global_name("mlp.experts.local_experts.1.x", 0, 8) == "mlp.experts.local_experts.9.x"


@pytest.mark.parametrize("wgrad", [kernels.AccumulatingWgrad, None], ids=["at-once", "delayed"])
def test_gradients_of_micro_batches_add_up_in_the_buffer(
    wgrad: Any, groups: ProcessGroupCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    delayed = kernels.DelayedWgrad(copies_inputs=False)
    monkeypatch.setattr(core_private, "installed_weight_gradient", lambda: wgrad or delayed)
    ours, theirs = both(groups, config(params_dtype=torch.bfloat16, bf16=True), fused=True)
    for weight in ours.parameters():
        weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
    summed: dict[str, torch.Tensor] = {}
    for factor in (1.0, 0.003):
        for module in (ours, theirs):
            rows, probs = tokens(COUNTS, torch.bfloat16)
            (module(rows, torch.tensor(COUNTS), probs)[0] * factor).sum().backward()
        for name, grad in gradients(theirs).items():
            summed[name] = summed.get(name, torch.zeros(())) + grad.float()
        theirs.zero_grad()
    if wgrad is None:
        assert not ours.linear_fc1.weight.main_grad.any()
        delayed.compute()
    for name, weight in named_parameters([_Layer(ours)], [0]):
        reference = summed[name.removeprefix("mlp.experts.")]
        torch.testing.assert_close(weight.main_grad, reference, rtol=0.02, atol=1e-3)
    assert ours.linear_fc1.weight.grad_added_to_main_grad


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_A_GPU])]
)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_grouped_products_are_those_of_a_loop(
    device: str, counts: list[int], dtype: torch.dtype
) -> None:
    """Forward, input gradient and weight gradient; an expert without tokens has none."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), 16, generator=generator).to(device, dtype)
    grads = torch.randn(sum(counts), 24, generator=generator).to(device, dtype)
    weights = torch.randn(len(counts), 24, 16, generator=generator).to(device, dtype)
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    assert kernels.can_group(rows, 24)
    tolerance = {"rtol": 0.02, "atol": 0.05} if dtype == torch.bfloat16 else {}
    pairs = (
        (kernels.grouped_product, kernels.looped_product, (rows, weights.transpose(1, 2), ends)),
        (kernels.grouped_product, kernels.looped_product, (grads, weights, ends)),
        (kernels.grouped_wgrad, kernels.looped_wgrad, (rows, grads, ends)),
    )
    for grouped, looped, inputs in pairs:
        torch.testing.assert_close(grouped(*inputs), looped(*inputs), **tolerance)


@pytest.mark.gpu
@NEEDS_A_GPU
@given(
    counts=st.lists(st.integers(0, 200), min_size=1, max_size=9).filter(any),
    sizes=st.tuples(*[st.sampled_from([8, 24, 128, 136, 304])] * 2),
)
def test_weight_gradients_are_added_in_float32_on_a_gpu(
    counts: list[int], sizes: tuple[int, int]
) -> None:
    """Of whole numbers, whose sums are exact."""
    from megatron.hetero.grouped_wgrad import add_grouped_wgrad

    rows, columns = sizes
    generator = torch.Generator().manual_seed(sum(counts))
    shapes = ((sum(counts), rows), (sum(counts), columns), (len(counts), rows, columns))
    grads, inputs, sums = (
        torch.randint(-3, 4, shape, generator=generator).cuda().float() for shape in shapes
    )
    ends = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
    expected = sums + kernels.looped_wgrad(inputs, grads, ends)
    add_grouped_wgrad(sums, grad_output_tn=grads.bfloat16(), input_tk=inputs.bfloat16(), ends=ends)
    assert torch.equal(sums, expected)
