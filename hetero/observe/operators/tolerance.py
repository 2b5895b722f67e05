"""How far two honest computations of one tensor may lie apart.

Everything is counted in `eps` of the tensor's dtype (2^-7 for bfloat16, 2^-10 for float16, 2^-23
for float32) and measured against the tensor's root mean square, because an element that is the
small difference of large ones carries the rounding errors of the large ones.

One rounding to nearest leaves an error of at most eps/2 of an element and at most 0.29 eps of the
root mean square. A kernel may round several times in the tensor's dtype, independently of each
other, and accumulates its sums in float32, one after the other in the worst case. Half as much
again is allowed. A reference in float64 has no error of its own; of two devices each brings one.

The matrices of a product in fp8 are rounded before it. As terms have random signs, the error of
each matrix in parts of its root mean square is an error of the result in parts of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_ONE_ROUNDING = 0.45
"""eps of root mean square: 1/sqrt(12), and half as much again."""
_ACCUMULATION = 1.0
"""float32 eps times the root of the summed terms: 0.2 for a sum made term after term and rounded
to nearest; matrix units cut off instead."""
_ELEMENT = 6.0
"""Standard deviations that no element of a sample may be away, besides its own rounding."""
_DRIFT = 0.25
"""Part of the results' rounding that may be a common factor; rounding to nearest has none."""


@dataclass(frozen=True)
class Rounding:
    """What an operator's honest kernels do to their results."""

    roundings: int
    """How often a value is rounded to the tensor's dtype on its way."""
    terms: int = 1
    """The longest sum, of forward or backward, accumulated in float32."""
    amplification: float = 1.0
    """How much float32 errors inside grow on their way out, as those in an exponent do."""
    backward: int | None = None
    """`roundings` of the gradients, where they are others."""
    operands: float = 0.0
    """eps of what the matrices of a product are rounded to, both together: the root of the sum of
    their squares. 0 where they are in the tensor's dtype."""
    backward_operands: float = 0.0
    """The same of the products of gradients."""

    def times(self, *, is_gradient: bool) -> int:
        """How often a value of the result, or of a gradient, is rounded."""
        return self.backward if is_gradient and self.backward is not None else self.roundings


@dataclass(frozen=True)
class Tolerance:
    """The limits for one tensor."""

    error: float
    """Of the root mean square of the difference over that of the reference."""
    drift: float
    """Of the best common factor's distance from one."""
    atol: float
    """Of one element's difference, as a part of the reference's root mean square..."""
    rtol: float
    """...plus this part of the element's own magnitude..."""
    floor: float
    """...plus this, the spacing of the dtype's smallest numbers."""
    eps: float
    summed_in_dtype: float
    """The `error` of results whose sums were accumulated in the dtype instead of in float32."""


def tolerance(
    dtype: torch.dtype,
    rounding: Rounding,
    *,
    elements: int,
    is_gradient: bool = False,
    sides: int = 1,
) -> Tolerance:
    """The limits for `elements` of a tensor of `dtype`; `sides` is how many of the two round."""
    info = torch.finfo(dtype)
    inside = rounding.amplification * math.sqrt(rounding.terms) * torch.finfo(torch.float32).eps
    accumulated = _ACCUMULATION * inside * math.sqrt(sides)
    times = rounding.times(is_gradient=is_gradient) * sides
    operands = rounding.backward_operands if is_gradient else rounding.operands
    operands *= math.sqrt(sides)
    rounded = _ONE_ROUNDING * math.hypot(math.sqrt(times) * info.eps, operands)
    error = rounded + accumulated
    return Tolerance(
        error=error,
        # The factor of a few elements is as uncertain as their rounding.
        drift=rounded * min(1.0, _DRIFT + 3.0 / math.sqrt(max(1, elements))) + accumulated,
        atol=_ELEMENT * error,
        rtol=sides * info.eps,
        floor=sides * info.smallest_normal * info.eps,
        eps=info.eps,
        summed_in_dtype=_ONE_ROUNDING * math.sqrt(rounding.terms * sides) * info.eps,
    )
