"""What is kept of one tensor: a fixed choice of its elements, and the size of the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sample:
    """Elements of one tensor, and facts about all of it."""

    values: torch.Tensor
    """One dimension, on the CPU, in the tensor's own dtype."""
    shape: tuple[int, ...]
    rms: float
    """Root mean square of every element of the tensor; not finite if one of them is not."""
    not_finite: int
    """How many elements of the whole tensor are infinite or not a number."""

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype


def stride_for(elements: int, count: int) -> int:
    """The distance between the elements that a sample of at most about `count` of them takes.

    It has no factor in common with the number of elements, and so with no dimension: a multiple of
    the last dimension would take one column again and again, a multiple of a head's width would
    leave out heads.
    """
    stride = max(1, elements // count)
    while math.gcd(stride, elements) > 1:
        stride -= 1
    return stride


def take(tensor: torch.Tensor, *, count: int) -> Sample:
    """The sample of a tensor on any device: `count` elements or a few more, 0 for all of them."""
    flat = tensor.detach().reshape(-1)
    elements = flat.numel()
    stride = 1 if count == 0 or elements <= count else stride_for(elements, count)
    norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
    return Sample(
        # A copy: the tensor may be changed in place afterwards.
        values=flat[::stride].to("cpu", copy=True),
        shape=tuple(tensor.shape),
        rms=norm / math.sqrt(max(1, elements)),
        not_finite=int((~torch.isfinite(flat)).sum()),
    )
