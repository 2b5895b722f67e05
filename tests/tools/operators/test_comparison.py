"""The verdict over two dumps, the first operator that diverges, and what that looks like."""

from __future__ import annotations

import pytest
import torch

from hetero.observe.operators.difference import hint
from hetero.observe.operators.sample import take
from hetero.tools.operators.comparison import Row, compare, lines, verdict
from hetero.tools.operators.dump import Dump
from tests.tools.operators.made_dumps import dump, reference, tensors

NORM, LINEAR = "isolated/norm/output", "isolated/linear/output"
NORM_GRAD, LINEAR_GRAD = "isolated/norm/grad hidden", "isolated/linear/grad weight"


def test_roundings_agree_with_the_reference_and_each_other() -> None:
    for pair in ((dump(), reference()), (reference(), dump())):
        comparison = compare(*pair)
        assert comparison.right.is_reference
        assert comparison.passed
    nearby = {name: t * (1 + 1e-3 * torch.randn(64, 64)) for name, t in tensors().items()}
    assert compare(dump(), dump(nearby, vendor="amd")).passed


@pytest.mark.parametrize(
    ("faulty", "first"),
    [
        ([LINEAR], ("linear", "output")),
        ([LINEAR, NORM], ("norm", "output")),
        # Backward comes after forward, and runs the other way.
        ([NORM_GRAD, LINEAR], ("linear", "output")),
        ([NORM_GRAD, LINEAR_GRAD], ("linear", "grad weight")),
    ],
)
def test_the_first_to_diverge_is_the_first_that_was_computed(faulty, first) -> None:
    row = _first(dump({name: tensors()[name].flip(0) for name in faulty}))
    assert (row.operator, row.tensor) == first


def test_errors_that_add_up_in_the_whole_model_decide_nothing() -> None:
    wrong = {"accumulated/linear/output": tensors()["accumulated/linear/output"].flip(0)}
    assert compare(dump(wrong), reference()).passed


def _first(left: Dump, right: Dump | None = None) -> Row:
    return compare(left, right or reference()).first


def _hint(wrong: torch.Tensor) -> str:
    return hint(_first(dump({LINEAR: wrong})).difference)


def test_the_hint_tells_rounding_scale_place_and_formula_apart() -> None:
    right = tensors()[LINEAR]
    noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    assert "differs like rounding (1.3" in _hint(right * (1 + 0.01 * noise))
    assert "1.01" in _hint(right * 1.01)
    assert "times the other side's: a wrong scale" in _hint(right * 2)
    tile = right.clone()
    tile[:8, :8] = 0
    assert "of its elements, and not in the others" in _hint(tile)
    assert "far more than rounding" in _hint(right.T)


def test_float32_products_of_tf32_factors_are_recognised() -> None:
    right = tensors()[LINEAR]
    cut = (right * (1 + 3e-4 * torch.randn(64, 64))).float()
    dumped = dump()
    wrong = Dump(dumped.header, dumped.samples | {LINEAR: take(cut, count=0)})
    assert "TF32" in hint(_first(wrong).difference)


def test_what_is_not_finite_or_of_another_shape_is_said() -> None:
    broken = tensors()[LINEAR]
    broken[3, 3] = torch.inf
    assert "1 and 0 of its elements are not finite" in _hint(broken)
    assert "its shape is 64x32 and 64x64" in _hint(tensors()[LINEAR][:, :32])


def test_a_difference_outside_the_sample_shows_in_the_size_of_the_whole() -> None:
    whole = tensors()[LINEAR].to(torch.bfloat16)
    wrong = whole.clone()
    stride = 63
    assert torch.equal(take(whole, count=65).values, whole.flatten()[::stride])
    wrong.flatten()[1::stride] *= 3
    dumps = [
        Dump(side.header, side.samples | {LINEAR: take(tensor, count=65)})
        for side, tensor in ((dump(), wrong), (reference(), whole.double()))
    ]
    assert "root mean square of the whole" in hint(_first(*dumps).difference)


def test_a_tensor_that_one_side_lacks_is_said() -> None:
    full = dump()
    less = Dump(full.header, {k: v for k, v in full.samples.items() if k != NORM_GRAD})
    row = _first(less)
    assert (row.operator, row.tensor) == ("norm", "grad hidden")
    assert "only one of the sides" in hint(row.difference)


def test_the_table_shows_every_operator_and_ends_with_the_verdict() -> None:
    comparison = compare(dump({LINEAR: tensors()[LINEAR].T}), reference())
    text = list(lines(comparison))
    assert text[0] == "nvidia (NVIDIA H200, torch 2.11.0, CUDA 13.0), bfloat16"
    assert text[1] == "against the float64 reference"
    assert sum(line.endswith("pass") for line in text) == 5
    assert sum(line.endswith("FAIL") for line in text) == 1
    assert text[-1] == verdict(comparison)
    assert text[-1].startswith("The first operator that diverges is linear, forward (output): it ")
    agreed = verdict(compare(dump(), reference()))
    assert agreed == "All 2 operators agree within rounding, forward and backward."
