"""How one tensor differs from another of the same, and whether rounding explains that."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import torch

from hetero.observe.operators.sample import Sample
from hetero.observe.operators.tolerance import Rounding, Tolerance, tolerance

_TF32 = (5e-5, 2e-3)
"""Errors of float32 results whose factors were cut to TF32's 10 bits."""
_STRAY, _STRAY_FAR = 2e-4, 4.0
"""Honest kernels may leave this share of the elements beyond their tolerance, and none so many
times beyond it: where rows of very different size meet, as in attention's gradients, errors are not
normally distributed."""
_FEW = 0.05
"""A difference in a smaller share of the elements than this is a matter of place."""


class Excess(IntEnum):
    """Which tolerance a difference exceeds, the worst last."""

    NONE = 0
    ELEMENTS = 1
    """That of single elements, whereas the error of all is within its own."""
    FACTOR = 2
    """That of a factor which all elements have in common."""
    ERROR = 3
    """That of the error of all elements, or the two cannot be compared."""


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
        return self.excess is Excess.NONE

    @property
    def excess(self) -> Excess:
        # Asked in this form, nan exceeds every limit.
        if self.problem or not self.error <= self.limits.error:
            return Excess.ERROR
        if not abs(self.factor - 1.0) <= self.limits.drift:
            return Excess.FACTOR
        if self.beyond <= _STRAY and self.worst <= _STRAY_FAR:
            return Excess.NONE
        return Excess.ELEMENTS

    def measured(self) -> str:
        """What exceeds its tolerance, beside that tolerance, or why nothing can be measured."""
        if self.problem:
            return self.problem
        if self.excess is Excess.ELEMENTS:
            return (
                f"{100.0 * self.beyond:.2g}% of the elements beyond their tolerance, allowed "
                f"{100.0 * _STRAY:.2g}%; the worst by {self.worst:.3g} times, allowed "
                f"{_STRAY_FAR:.3g}"
            )
        if self.excess is Excess.FACTOR:
            apart = abs(self.factor - 1.0)
            return f"a common factor {apart:.1e} from 1, allowed {self.limits.drift:.1e}"
        return f"error {self.error:.1e}, allowed {self.limits.error:.1e}"


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
        return incomparable(f"its shape is {_shape(left)} and {_shape(right)}", limits)
    if left.not_finite or right.not_finite:
        return incomparable(
            f"{left.not_finite} and {right.not_finite} of its elements are not finite", limits
        )
    measured = _measure(left.values.double(), right.values.double(), limits)
    whole = _relative(max(0.0, abs(left.rms - right.rms) - limits.floor), right.rms)
    if whole > limits.error and measured.passed:
        return incomparable(
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


def incomparable(problem: str, limits: Tolerance) -> Difference:
    """A difference of what cannot be compared, and why."""
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
            f"it differs by far more than rounding in {100.0 * found.beyond:.2g}% of its elements, "
            "and not in the others: a bug in a part of it, such as a tile, a head or a mask"
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
