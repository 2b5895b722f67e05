"""Two dumps side by side: which tensors differ by more than rounding, and what it looks like."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hetero.tools.operators.dump import (
    ACCUMULATED,
    ISOLATED,
    Dump,
    Header,
    require_comparable,
)
from hetero.tools.operators.sample import Sample
from hetero.tools.operators.tolerance import Rounding, Tolerance, tolerance

_TF32 = (5e-5, 2e-3)
"""Errors of float32 results whose factors were cut to TF32's 10 bits."""
_STRAY, _STRAY_FAR = 2e-4, 4.0
"""Honest kernels may leave this share of the elements beyond their tolerance, and none so many
times beyond it: where rows of very different size meet, as in attention's gradients, errors are not
normally distributed."""
_FEW = 0.05
"""A difference in a smaller share of the elements than this is a matter of place."""


@dataclass(frozen=True)
class Difference:
    """How one tensor of one side differs from the other side's."""

    max_abs: float
    max_rel: float
    """The largest difference of an element over its magnitude plus the root mean square."""
    error: float
    """Root mean square of the difference over the root mean square of the reference."""
    factor: float
    """The number by which the reference would have to be multiplied to come closest."""
    beyond: float
    """Share of the elements that lie beyond their tolerance."""
    worst: float
    """The largest difference of an element over that element's tolerance."""
    problem: str
    """Why the two cannot be compared element by element; empty where they can."""
    limits: Tolerance

    @property
    def passed(self) -> bool:
        return (
            not self.problem
            and self.beyond <= _STRAY
            and self.worst <= _STRAY_FAR
            and self.error <= self.limits.error
            and abs(self.factor - 1.0) <= self.limits.drift
        )


@dataclass(frozen=True)
class Row:
    """One tensor of one operator."""

    operator: str
    tensor: str
    difference: Difference

    @property
    def is_forward(self) -> bool:
        return not _is_gradient(self.tensor)


@dataclass(frozen=True)
class Comparison:
    """Two dumps compared. Isolated rows decide; accumulated ones only show how errors grow."""

    left: Header
    right: Header
    isolated: tuple[Row, ...]
    accumulated: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        return all(row.difference.passed for row in self.isolated)

    @property
    def first(self) -> Row | None:
        """The first row that diverges: forward in order, then backward in backward's order."""
        forward = [row for row in self.isolated if row.is_forward]
        backward = [row for row in self.isolated if not row.is_forward]
        for row in [*forward, *reversed(backward)]:
            if not row.difference.passed:
                return row
        return None


def compare(left: Dump, right: Dump) -> Comparison:
    """Compare `left` with `right`, the reference where one of them is; raises UserError."""
    if left.header.is_reference and not right.header.is_reference:
        left, right = right, left
    require_comparable(left.header, right.header)
    return Comparison(
        left.header,
        right.header,
        tuple(_rows(left, right, ISOLATED)),
        tuple(_rows(left, right, ACCUMULATED)),
    )


def _rows(left: Dump, right: Dump, mode: str) -> Iterator[Row]:
    sides = 1 if right.header.is_reference else 2
    for operator in right.header.operators:
        ours, theirs = left.tensors(mode, operator.name), right.tensors(mode, operator.name)
        for name in {**theirs, **ours}:
            if name in ours and name in theirs:
                found = difference(
                    ours[name],
                    theirs[name],
                    rounding=operator.rounding,
                    is_gradient=_is_gradient(name),
                    sides=sides,
                )
            else:
                present = ours.get(name) or theirs[name]
                limits = tolerance(present.dtype, operator.rounding, elements=1)
                found = _incomparable("only one of the sides has computed it", limits)
            yield Row(operator.name, name, found)


def _is_gradient(tensor: str) -> bool:
    return tensor.startswith("grad ")


def difference(
    left: Sample,
    right: Sample,
    *,
    rounding: Rounding,
    is_gradient: bool = False,
    sides: int = 1,
) -> Difference:
    """How `left` differs from `right`; where `sides` is 1, `right` was not rounded to a dtype."""
    rounded = [left.dtype] if sides == 1 else [left.dtype, right.dtype]
    # A weight's gradient is float32 where a fused kernel adds it to its buffer, and else rounded.
    coarsest = max(rounded, key=lambda dtype: torch.finfo(dtype).eps)
    limits = tolerance(
        coarsest,
        rounding,
        elements=left.values.numel(),
        is_gradient=is_gradient,
        sides=sides,
    )
    if left.shape != right.shape or left.values.numel() != right.values.numel():
        return _incomparable(f"its shape is {_shape(left)} and {_shape(right)}", limits)
    if left.not_finite or right.not_finite:
        return _incomparable(
            f"{left.not_finite} and {right.not_finite} of its elements are not finite", limits
        )
    measured = _measure(left.values.double(), right.values.double(), limits)
    whole = _relative(max(0.0, abs(left.rms - right.rms) - limits.floor), right.rms)
    if whole > limits.error and measured.passed:
        return _incomparable(
            f"its sampled elements agree, but the root mean square of the whole is {left.rms:.6g} "
            f"and {right.rms:.6g}",
            limits,
        )
    return measured


def _measure(left: torch.Tensor, right: torch.Tensor, limits: Tolerance) -> Difference:
    apart = (left - right).abs()
    rms = float(right.square().mean().sqrt())
    allowed = limits.atol * rms + limits.rtol * right.abs() + limits.floor
    # What lies below the dtype's smallest numbers is nobody's error.
    error = max(0.0, float(apart.square().mean().sqrt()) - limits.floor)
    energy = float(right.square().sum())
    return Difference(
        max_abs=float(apart.max()),
        max_rel=float((apart / (right.abs() + rms).clamp_min(limits.floor)).max()),
        error=_relative(error, rms),
        factor=float((left * right).sum()) / energy if energy and error else 1.0,
        beyond=float((apart > allowed).double().mean()),
        worst=float((apart / allowed).max()),
        problem="",
        limits=limits,
    )


def _relative(error: float, size: float) -> float:
    if not error:
        return 0.0
    return error / size if size else math.inf


def _incomparable(problem: str, limits: Tolerance) -> Difference:
    nan = math.nan
    return Difference(nan, nan, nan, nan, 1.0, nan, problem=problem, limits=limits)


def _shape(sample: Sample) -> str:
    return "x".join(map(str, sample.shape)) or "one number"


def hint(found: Difference) -> str:
    """What a difference beyond its tolerance looks like, for whoever has to find its cause."""
    if found.problem:
        return found.problem
    ulps = found.error / found.limits.eps
    apart = abs(found.factor - 1.0)
    # What would be left if the one side were divided by the factor.
    rest = math.sqrt(max(0.0, found.error**2 - apart**2))
    if apart > found.limits.drift and rest <= max(found.limits.error, 0.1 * apart):
        return (
            f"it is {found.factor:.6g} times the other side's, which rounding does not do: a wrong "
            "scale, or results that are cut off instead of rounded"
            if found.error <= 4 * found.limits.error
            else f"it is {found.factor:.6g} times the other side's: a wrong scale"
        )
    if found.limits.eps < 1e-6 and _TF32[0] < found.error < _TF32[1]:
        return (
            f"it differs by {found.error:.1e}, as float32 products do whose factors were cut to "
            "TF32 or bfloat16"
        )
    if 0.0 < found.beyond < _FEW and found.worst > _STRAY_FAR:
        return (
            f"it differs by far more than rounding in {found.beyond:.2%} of its elements, and not "
            "in the others: a bug in a part of it, such as a tile, a head or a mask"
        )
    if found.error <= 4 * found.limits.error:
        return (
            f"it differs like rounding ({ulps:.2g} ulp), but more than expected: a kernel that "
            "accumulates or rounds in a lower precision"
        )
    if found.error <= found.limits.summed_in_dtype:
        return (
            f"it differs by more than rounding ({ulps:.3g} ulp), as much as sums would that are "
            "accumulated in its own dtype instead of in float32"
        )
    return f"it differs by far more than rounding ({ulps:.3g} ulp): a bug or another formula"
