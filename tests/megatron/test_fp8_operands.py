"""Matrices in fp8: the types of a device, how factors follow from maxima, grouped products, and
what the kernels of a GPU have to do."""

from __future__ import annotations

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import HeteroError
from megatron.hetero import fp8_operands
from megatron.hetero.fp8_operands import (
    ROWWISE,
    SWIGLU,
    SWIGLU_GRADIENT,
    Operand,
    Types,
    add_product,
    adds_in_product,
    cast,
    cast_both_ways,
    cast_by_rows,
    casts_swiglu,
    grouped_product,
    magnitude,
    multiplies_groups,
    product,
    require_device,
    scale_of,
    swiglu,
    swiglu_gradient,
)
from tests.gpus import NEEDS_A_GPU
from tests.megatron.fp8_cases import CPU, TYPES, decibels, recipe


@given(st.floats(min_value=0, width=32), st.sampled_from([*TYPES.values()]), st.integers(0, 4))
def test_scales_and_their_inverses_are_finite_numbers(
    amax: float, types: Types, margin: int
) -> None:
    for dtype in (types.e4m3, types.e5m2):
        scale = scale_of(torch.tensor(amax), dtype, margin=margin)
        assert scale > 0
        assert scale.isfinite()
        assert (1 / scale).isfinite()
        if math.isfinite(amax):
            assert amax * float(scale) <= torch.finfo(dtype).max / 2**margin * (1 + 1e-6)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("gfx942:sramecc+:xnack-", "fnuz"), ("gfx950", "fn"), (None, "fn")],
    ids=["MI300X", "MI350", "NVIDIA"],
)
def test_a_gpu_has_its_own_types_whatever_vendor_it_simulates(
    architecture: str | None, expected: str
) -> None:
    properties = SimpleNamespace(**({"gcnArchName": architecture} if architecture else {}))
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=properties):
        for vendor in ("nvidia", "amd"):
            assert Types.of(torch.device("cuda"), vendor) == TYPES[expected]


def test_a_device_that_cannot_multiply_is_named() -> None:
    refusal = RuntimeError("needs sm_89\nmore")
    with (
        mock.patch.object(torch, "_scaled_mm", side_effect=refusal),
        pytest.raises(HeteroError, match=r"this CPU .* e4m3fn and e5m2 .*: needs sm_89;"),
    ):
        require_device(CPU, recipe(TYPES["fn"]))


def test_a_device_whose_products_are_wrong_is_named() -> None:
    wrong = torch.zeros(32, 32, dtype=torch.bfloat16)
    with (
        mock.patch.object(torch, "_scaled_mm", return_value=wrong),
        pytest.raises(HeteroError, match="its products are wrong"),
    ):
        require_device(CPU, recipe(TYPES["fnuz"], ROWWISE))


def test_a_device_whose_kernel_casts_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = recipe(Types(torch.float8_e4m3fn, torch.float8_e5m2), "tensorwise")
    require_device(CPU, own)

    def clips_nothing(x, *, scale, dtype, **_):
        values = (x.float() * scale).to(dtype)
        return values, values.t().contiguous()

    monkeypatch.setattr(fp8_operands, "cast_both_ways", clips_nothing)
    with pytest.raises(HeteroError, match="its kernel casts otherwise than torch"):
        require_device(CPU, own)


# Grouped products of experts.


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_a_cpu_multiplies_groups_one_after_the_other(types: Types) -> None:
    assert multiplies_groups(CPU, recipe(types, ROWWISE))


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, ValueError, AttributeError])
def test_a_device_without_the_kernel_multiplies_no_groups(error: type[Exception]) -> None:
    with mock.patch.object(fp8_operands, "grouped_product", side_effect=error("none")):
        assert not multiplies_groups(CPU, recipe(TYPES["fn"]))


def test_a_device_whose_grouped_products_are_wrong_is_named() -> None:
    wrong = torch.zeros(32, 32, dtype=torch.bfloat16)
    with (
        mock.patch.object(fp8_operands, "grouped_product", return_value=wrong),
        pytest.raises(HeteroError, match=r"this CPU .* wrong grouped products of e4m3fn"),
    ):
        multiplies_groups(CPU, recipe(TYPES["fn"]))


class OnGpu(torch.Tensor):
    """A tensor without values that says it is on a GPU."""

    is_cuda = True


def test_torch_takes_what_a_gpu_is_given() -> None:
    """By torch's own checks of layouts, types and scales, which need no GPU."""
    rows, experts = torch.randn(40, 32), torch.randn(3, 48, 32)
    e4m3 = TYPES["fn"].e4m3
    ends = torch.tensor([7, 7, 40], dtype=torch.int32, device="meta")

    def without_values(operand: Operand) -> Operand:
        values, inverse = operand.values.to("meta"), operand.inverse.to("meta")
        return Operand(values.as_subclass(OnGpu), inverse)

    def spread(x: torch.Tensor, *scales: int) -> Operand:
        return Operand(x.to(e4m3), torch.ones(scales)).scaled_by_rows()

    for left in (cast_by_rows(rows, dtype=e4m3), spread(rows)):
        for right in (cast_by_rows(experts, dtype=e4m3), spread(experts, 3), spread(experts)):
            given = grouped_product(without_values(left), without_values(right), ends)
            assert given.shape == (40, 48)
            assert given.dtype == torch.bfloat16


def test_the_gradient_of_swiglu_is_that_of_autograd() -> None:
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(8, 32, generator=generator).requires_grad_()
    grad = torch.randn(8, 16, generator=generator)
    swiglu(gate_up).backward(grad)
    torch.testing.assert_close(swiglu_gradient(grad, gate_up.detach()), gate_up.grad)


def test_a_cpu_adds_products_to_float32() -> None:
    types = TYPES["fn"]
    left, right = (
        Operand(torch.randn(rows, 32).to(types.e4m3), torch.tensor(0.5)) for rows in (16, 48)
    )
    total = torch.ones(16, 48)
    add_product(total, left, right)
    assert torch.equal(total, 1 + product(left, right, torch.float32))


# Kernels of GPUs.


@pytest.mark.gpu
@NEEDS_A_GPU
@pytest.mark.parametrize("shape", [(96, 160), (1, 16), (130, 4112)])
@pytest.mark.parametrize("transposed", [True, False])
def test_a_gpu_casts_to_the_same_bits(shape: tuple[int, int], transposed: bool) -> None:
    from megatron.hetero.fp8_cast import cast_both, largest_magnitude

    device = torch.device("cuda")
    types = Types.of(device, "nvidia")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x[0, 0], x[0, 1], x[-1, -1] = math.nan, -math.inf, 1000.0
    for dtype in (types.e4m3, types.e5m2):
        scale = torch.tensor(3.0)
        seen = torch.zeros((), device=device)
        values, turned = cast_both(
            x.to(device), scale=scale.to(device), dtype=dtype, transposed=transposed, seen=seen
        )
        expected = cast(x, scale, dtype).float()
        assert torch.equal(values.cpu().float().nan_to_num(7), expected.nan_to_num(7))
        assert (turned is not None) == transposed
        if turned is not None:
            assert torch.equal(turned.cpu().float().t().nan_to_num(7), expected.nan_to_num(7))
        assert seen.isinf()
        assert largest_magnitude(x.to(device)).isinf()
        assert float(largest_magnitude(x.nan_to_num(0, 0, 0).to(device))) == 1000.0


@pytest.mark.gpu
@NEEDS_A_GPU
@pytest.mark.parametrize("shape", [(96, 160), (1, 16), (130, 4112)])
def test_a_gpu_transposes_bytes(shape: tuple[int, int]) -> None:
    from megatron.hetero.fp8_cast import transpose

    device = torch.device("cuda")
    count = shape[0] * shape[1]
    values = torch.arange(count, device=device).to(torch.uint8).view(shape)
    for dtype in (Types.of(device, "nvidia").e4m3, Types.of(device, "nvidia").e5m2):
        turned = transpose(values.view(dtype))
        assert turned.dtype == dtype
        assert torch.equal(turned.view(torch.uint8), values.t())


@pytest.mark.gpu
@NEEDS_A_GPU
@pytest.mark.parametrize("rows", [64, 100, 4096])
@pytest.mark.parametrize("form", [SWIGLU, SWIGLU_GRADIENT])
def test_a_gpu_casts_swiglu_and_its_gradient_in_one_pass(form: str, rows: int) -> None:
    device = torch.device("cuda")
    dtype = Types.of(device, "nvidia").e4m3
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(rows, 2048, generator=generator).to(torch.bfloat16)
    grad = torch.randn(rows, 1024, generator=generator).to(torch.bfloat16)
    inputs = (gate_up,) if form == SWIGLU else (grad, gate_up)
    exact = swiglu(*inputs) if form == SWIGLU else swiglu_gradient(*inputs)
    on_gpu = [x.to(device) for x in inputs]
    amax = magnitude(*on_gpu, form=form)
    # A GPU's sigmoid may round to the neighbour in bf16.
    assert torch.allclose(amax.cpu(), exact.abs().max().float(), rtol=2**-7)
    seen = torch.zeros((), device=device)
    scale = scale_of(amax, dtype)
    values, turned = cast_both_ways(
        *on_gpu, scale=scale, dtype=dtype, form=form, transposed=True, seen=seen
    )
    assert turned is not None
    assert torch.equal(seen, amax)
    assert torch.equal(turned.float().t(), values.float())
    assert decibels(values.float().cpu() / scale.cpu(), exact) > 28
    assert casts_swiglu(device, dtype)


@pytest.mark.gpu
@NEEDS_A_GPU
@pytest.mark.parametrize("left", ["e4m3", "e5m2"])
def test_a_gpu_adds_products_to_float32(left: str) -> None:
    device = torch.device("cuda")
    types = Types.of(device, "nvidia")
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randn(shape, generator=generator) for shape in ((96, 256), (160, 256)))
    grad, x = (each.to(device) for each in drawn)
    scales = torch.tensor(3.0, device=device), torch.tensor(20.0, device=device)
    dtypes = getattr(types, left), types.e4m3
    operands = [
        Operand(cast(each, scale, dtype), 1 / scale)
        for each, scale, dtype in zip((grad, x), scales, dtypes, strict=True)
    ]
    total = torch.ones(96, 160, device=device)
    for _ in range(2):
        add_product(total, *operands)
    expected = 1 + 2 * product(*operands, torch.float32)
    assert torch.allclose(total, expected, rtol=1e-4, atol=1e-3)
    assert adds_in_product(device, *dtypes) == (torch.version.hip is None)


@pytest.mark.gpu
@NEEDS_A_GPU
@pytest.mark.parametrize("scales", [(), (3,)], ids=["one-for-all", "one-for-each"])
def test_a_gpu_casts_the_matrices_of_experts_to_the_same_bits(scales: tuple[int, ...]) -> None:
    from megatron.hetero.fp8_cast import cast_both, largest_magnitude

    device = torch.device("cuda")
    dtype = Types.of(device, "nvidia").e4m3
    x = torch.randn(3, 130, 208, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x[1] *= 100
    scale = torch.rand(scales, generator=torch.Generator().manual_seed(2)) + 0.5
    seen = torch.zeros((), device=device)
    values, turned = cast_both(
        x.to(device), scale=scale.to(device), dtype=dtype, transposed=True, seen=seen
    )
    expected = cast(x, scale.view(-1, 1, 1), dtype).float()
    assert turned is not None
    assert torch.equal(values.cpu().float(), expected)
    assert torch.equal(turned.cpu().float().mT, expected)
    each = x.float().abs().amax(dim=(1, 2))
    assert torch.equal(largest_magnitude(x.to(device)).cpu(), each)
    assert float(seen) == float(each.max())
