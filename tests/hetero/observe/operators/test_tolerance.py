"""Honest kernels pass, whatever their size; mistakes do not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from hetero.observe.operators.difference import Difference, difference, hint
from hetero.observe.operators.sample import take
from hetero.observe.operators.tolerance import Rounding, tolerance

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HALVES = DTYPES[:2]
PRODUCT = Rounding(roundings=2, terms=14336)
EPS = torch.finfo(torch.float8_e4m3fn).eps


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _against(
    computed: torch.Tensor, exact: torch.Tensor, *, rounding: Rounding = PRODUCT
) -> Difference:
    return difference(take(computed, count=0), take(exact, count=0), rounding=rounding)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_over_14336_terms_passes(dtype) -> None:
    """The second projection of LLaMA-8B's MLP: float32 sums, one rounding of the result."""
    x, weight = _normal(32, 14336).to(dtype), (_normal(64, 14336, seed=1) * 0.02).to(dtype)
    exact = x.double() @ weight.double().T
    found = _against((x.float() @ weight.float().T).to(dtype), exact)
    assert found.passed
    assert found.error > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_made_term_after_term_passes(dtype) -> None:
    """The worst honest order of a float32 accumulation."""
    x, y = _normal(4096, 64).to(dtype), _normal(4096, 64, seed=1).to(dtype)
    total = torch.zeros(64)
    for a, b in zip(x.float(), y.float(), strict=True):
        total += a * b
    assert _against(total.to(dtype), (x.double() * y.double()).sum(0)).passed


@pytest.mark.parametrize("dtype", HALVES)
def test_a_sum_made_in_half_precision_does_not(dtype) -> None:
    x = _normal(4096, 64).to(dtype)
    total = torch.zeros(64, dtype=dtype)
    for row in x:
        total += row
    found = _against(total, x.double().sum(0))
    assert not found.passed
    assert "accumulated in its own dtype" in hint(found)


FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "1 % too large": lambda x: x * 1.01,
    "1 % too small": lambda x: x * 0.99,
    "transposed": lambda x: x.T,
    "rows permuted": lambda x: x.roll(1, 0),
    "one head of 32 dropped": lambda x: x * (torch.arange(128) >= 4),
    "one row dropped": lambda x: x * (torch.arange(128)[:, None] != 77),
    "one element wrong": lambda x: x + (torch.arange(128 * 128).view(128, 128) == 5000),
    "negated": lambda x: -x,
    "nothing computed": lambda x: x * 0,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_found_in_every_dtype(fault, dtype) -> None:
    exact = _normal(128, 128)
    # Even with the widest tolerance that an operator's forward has.
    wide = Rounding(roundings=4, terms=200_000)
    assert _against(exact.to(dtype), exact, rounding=wide).passed
    assert not _against(FAULTS[fault](exact).to(dtype), exact, rounding=wide).passed


def test_two_devices_and_gradients_may_be_further_apart() -> None:
    one, two = (tolerance(torch.bfloat16, PRODUCT, elements=1000, sides=n) for n in (1, 2))
    assert two.error == pytest.approx(one.error * math.sqrt(2))
    attention = Rounding(roundings=4, backward=16)
    forward = tolerance(torch.float16, attention, elements=1000)
    backward = tolerance(torch.float16, attention, elements=1000, is_gradient=True)
    assert backward.error == pytest.approx(2 * forward.error, rel=1e-3)


def test_numbers_too_small_for_the_dtype_are_nobodys_error() -> None:
    exact = torch.full((64,), 1e-9, dtype=torch.float64)
    assert _against(exact.half(), exact).passed
    assert not _against(exact.float() * 1.01, exact).passed


@pytest.mark.parametrize("size", [64, 4096])
def test_matrices_rounded_to_fp8_have_the_error_that_is_allowed_of_them(size: int) -> None:
    """Whatever the number of terms: their errors have random signs, as the terms have."""
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(128, size, generator=generator) for _ in range(2))
    rounded = [one.to(torch.float8_e4m3fn).double() for one in (left, right)]
    exact = left.double() @ right.double().t()
    error = (rounded[0] @ rounded[1].t() - exact).norm() / exact.norm()
    both, with_e5m2 = math.hypot(EPS, EPS), math.hypot(EPS, 2 * EPS)
    of_fp8 = Rounding(roundings=2, terms=size, operands=both, backward_operands=with_e5m2)
    forward, backward = (
        tolerance(torch.bfloat16, of_fp8, elements=10_000, is_gradient=is_gradient).error
        for is_gradient in (False, True)
    )
    assert forward / 3 < error < forward < backward
