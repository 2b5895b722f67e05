"""Which reductions exist for which dtype, and how the vendors' libraries compute each.

A vendor's library reduces within the vendor. `combine` then reduces the vendors' partial results,
always in vendor order, so that every rank holds the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

Combine = Callable[..., torch.Tensor]

_COMBINE: dict[str, Combine] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_BITWISE = ("BAND", "BOR", "BXOR")
# A bool is stored as a byte of 0 or 1.
_BOOL_KERNELS = {
    "SUM": "MAX",
    "BOR": "MAX",
    "MAX": "MAX",
    "PRODUCT": "MIN",
    "BAND": "MIN",
    "MIN": "MIN",
}
_WIDENED = (torch.bool, torch.int16)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_PLAIN = frozenset({*_INTEGERS, *_FLOATS}.difference(_WIDENED))
"""The dtypes that the libraries reduce without conversion."""


_KINDS: Mapping[str, Any] = dist.ReduceOp.RedOpType.__members__
# By hash, which is equal for an op and its kind and distinct for kinds: comparing or converting
# torch's own types takes microseconds.
_NAMES = {hash(kind): name for name, kind in _KINDS.items()}
_PREMUL_SUM = hash(_KINDS["PREMUL_SUM"])


class UnsupportedError(RuntimeError):
    """A reduction that does not exist for a dtype."""


@dataclass(frozen=True)
class Reduction:
    """How tensors of one dtype are reduced over a group of a given size."""

    name: str
    """The reduction that the caller asked for."""
    kernel: str
    """What the libraries and `combine` compute: one of SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR."""
    size: int
    factor: float | torch.Tensor | None = None
    """Multiplies each rank's values before the reduction."""
    averages: bool = False
    """Whether the result is divided by the group's size."""

    @property
    def op(self) -> dist.ReduceOp:
        return getattr(dist.ReduceOp, self.kernel)

    def combine(self, one: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> None:
        _COMBINE[self.kernel](one, other, out=out)

    def prepare(self, tensor: torch.Tensor, *, private: bool = False) -> torch.Tensor:
        """The values as flat memory that can be reduced in place.

        It is the tensor's own memory if possible (`.data`: see memory_segments.py), but with
        `private` always a copy.
        """
        flat = tensor.data
        plain = flat.dtype in _PLAIN and flat.is_contiguous() and not flat.is_neg()
        if plain and self.factor is None:
            if flat.dim() != 1:
                flat = flat.view(-1)
            return flat.clone() if private else flat
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj())
        flat = flat.resolve_neg().contiguous().reshape(-1)
        if flat.dtype is torch.bool:
            flat = flat.view(torch.uint8)
        elif flat.dtype is torch.int16:
            flat = flat.to(torch.int32)
        if self.factor is not None:
            factor = self.factor
            flat = flat * (factor.to(flat) if isinstance(factor, torch.Tensor) else factor)
        if private and flat.data_ptr() == tensor.data_ptr():
            flat = flat.clone()
        return flat

    def output_buffer(self, target: torch.Tensor) -> torch.Tensor:
        """Flat memory for a result that `finish` writes to `target`: its own memory if possible."""
        if target.is_contiguous() and not (target.is_complex() or target.dtype in _WIDENED):
            flat = target.data
            return flat if flat.dim() == 1 else flat.view(-1)
        return torch.empty_like(self.prepare(target, private=True))

    def finish(self, flat: torch.Tensor, target: torch.Tensor) -> None:
        """Write a reduced result to its tensor."""
        if self.averages:
            if flat.is_floating_point():
                flat.div_(self.size)
            else:
                flat.div_(self.size, rounding_mode="trunc")
        if flat.data_ptr() == target.data_ptr() and target.is_contiguous():
            return
        if target.dtype is torch.bool:
            flat = flat.view(torch.bool)
        if target.is_complex():
            flat = torch.view_as_complex(flat.view(-1, 2))
        target.data.copy_(flat.view(target.shape))


def combine_in_order(
    reduction: Reduction, partials: dict[int, torch.Tensor], *, out: torch.Tensor
) -> None:
    """Reduce the vendors' partial results in vendor order. `out` may alias one of them."""
    first, *others = [partials[vendor] for vendor in sorted(partials)]
    if len(others) == 1:
        reduction.combine(first, others[0], out=out)
        return
    total = torch.empty_like(first)
    reduction.combine(first, others[0], out=total)
    for other in others[1:]:
        reduction.combine(total, other, out=total)
    out.copy_(total)


def reduction_for(op: Any, dtype: torch.dtype, *, size: int, on_cpu: bool = True) -> Reduction:
    """How to compute `op` for tensors of `dtype`. Raises UnsupportedError if it does not exist."""
    kind = hash(op)
    if kind == _PREMUL_SUM and (dtype in _FLOATS or dtype in _COMPLEX):
        return Reduction("PREMUL_SUM", "SUM", size, factor=_factor(op))
    return _reduction_for(kind, dtype, size, on_cpu)


@cache
def _reduction_for(kind: int, dtype: torch.dtype, size: int, on_cpu: bool) -> Reduction:
    reduction = _reduction_named(_NAMES[kind], dtype, size)
    if not on_cpu and reduction.kernel in _BITWISE:
        raise UnsupportedError(
            f"there is no reduction {reduction.name} in NCCL and RCCL; move the tensor to the CPU"
        )
    return reduction


def _reduction_named(name: str, dtype: torch.dtype, size: int) -> Reduction:
    floating = dtype in _FLOATS or dtype in _COMPLEX
    if name == "AVG" and dtype in (torch.float16, torch.complex32):
        # Scale first: the sum may overflow half precision.
        return Reduction(name, "SUM", size, factor=1.0 / size)
    if name == "AVG" and (floating or dtype in _INTEGERS):
        return Reduction(name, "SUM", size, averages=True)
    if dtype is torch.bool and (
        kernel := _BOOL_KERNELS.get(name, "BXOR" if name == "BXOR" else "")
    ):
        return Reduction(name, kernel, size)
    if name in _COMBINE and (
        dtype in _INTEGERS
        or (dtype in _FLOATS and name not in _BITWISE)
        or (dtype in _COMPLEX and name == "SUM")
    ):
        return Reduction(name, name, size)
    raise UnsupportedError(f"there is no reduction {name} of {dtype} tensors; take another")


def _factor(op: Any) -> float | torch.Tensor:
    # Its pickled state is the only place where every release of torch exposes the factor.
    return op.__getstate__()[1]
