"""Casts to 8-bit types on GPUs: a matrix, its transposed matrix and its maximum in one pass.

torch._scaled_mm takes a row-major left and a column-major right matrix, so that forward, input
gradient and weight gradient need both orders of every matrix. By plain operations casts and
transpositions take as long as fp8 saves. Imported on GPUs only; Triton has the same language on
both vendors.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

_TILE = 64
_SPAN = 16384
"""Elements of which one program takes the maximum."""


@triton.jit
def _finite_or_inf(x):  # type: ignore[no-untyped-def]
    """The absolute value; infinite for NaN, which a maximum would drop."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def _maximum(x_ptr, max_ptr, count, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a span of each matrix, `count` elements long."""
    matrix = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    x = tl.load(x_ptr + matrix * count + at, mask=at < count, other=0.0).to(tl.float32)
    tl.atomic_max(max_ptr + matrix, tl.max(_finite_or_inf(x)))


@triton.jit
def _cast_tile(  # type: ignore[no-untyped-def]
    x_ptr,
    cast_ptr,
    turned_ptr,
    scale_ptr,
    max_ptr,
    scale_step,
    rows,
    columns,
    LARGEST: tl.constexpr,
    TILE: tl.constexpr,
    HAS_MAXIMUM: tl.constexpr,
    TRANSPOSES: tl.constexpr,
):
    """One tile of one of the matrices (rows, columns) of x, contiguous, and of what comes of it."""
    matrix = tl.program_id(1).to(tl.int64)
    begin = matrix * rows * columns
    column_tiles = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % column_tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    at = begin + row[:, None] * columns + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    magnitude = _finite_or_inf(x)
    if HAS_MAXIMUM:
        tl.atomic_max(max_ptr, tl.max(magnitude))
    scale = tl.load(scale_ptr + matrix * scale_step)
    scaled = tl.minimum(tl.maximum(x * scale, -LARGEST), LARGEST)
    scaled = tl.where(magnitude < float("inf"), scaled, float("nan"))
    cast = scaled.to(cast_ptr.dtype.element_ty)
    tl.store(cast_ptr + at, cast, mask=inside)
    if TRANSPOSES:
        turned = begin + column[:, None] * rows + row[None, :]
        fits = (column[:, None] < columns) & (row[None, :] < rows)
        tl.store(turned_ptr + turned, tl.trans(cast), mask=fits)


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """As `fp8.largest_magnitude`, of all elements of x (rows, columns), (), or of each matrix of x
    (matrices, rows, columns), (matrices,). Contiguous."""
    found = torch.zeros(x.shape[:-2], dtype=torch.float32, device=x.device)
    count = x.shape[-2] * x.shape[-1]
    _maximum[(triton.cdiv(count, _SPAN), found.numel())](x, found, count, SPAN=_SPAN)
    return found


def cast_both(
    x: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    transposed: bool,
    seen: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`fp8.cast` of x (rows, columns) or (matrices, rows, columns), contiguous, and transposed.

    `scale` is (), or (matrices,). Raises `seen` (), float32, to the largest magnitude of x.
    """
    *matrices, rows, columns = x.shape
    cast = torch.empty(x.shape, dtype=dtype, device=x.device)
    turned = None
    if transposed:
        turned = torch.empty(*matrices, columns, rows, dtype=dtype, device=x.device)
    tiles = triton.cdiv(rows, _TILE) * triton.cdiv(columns, _TILE)
    _cast_tile[(tiles, math.prod(matrices))](
        x,
        cast,
        cast if turned is None else turned,
        scale,
        scale if seen is None else seen,
        scale.dim(),
        rows,
        columns,
        LARGEST=torch.finfo(dtype).max,
        TILE=_TILE,
        HAS_MAXIMUM=seen is not None,
        TRANSPOSES=transposed,
        num_warps=4,
    )
    return cast, turned
