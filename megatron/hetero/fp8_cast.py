"""Casts to 8-bit types on GPUs: a matrix, its transposed matrix and its maximum in one pass.

torch._scaled_mm takes a row-major left and a column-major right matrix, so that forward, input
gradient and weight gradient need both orders of every matrix. By plain operations casts and
transpositions take as long as fp8 saves. Imported on GPUs only; Triton has the same language on
both vendors.
"""

from __future__ import annotations

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
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    tl.atomic_max(max_ptr, tl.max(_finite_or_inf(x)))


@triton.jit
def _cast_tile(  # type: ignore[no-untyped-def]
    x_ptr,
    cast_ptr,
    turned_ptr,
    scale_ptr,
    max_ptr,
    rows,
    columns,
    LARGEST: tl.constexpr,
    TILE: tl.constexpr,
    HAS_MAXIMUM: tl.constexpr,
    TRANSPOSES: tl.constexpr,
):
    """One tile of x (rows, columns), contiguous, and of what comes of it."""
    column_tiles = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % column_tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    at = row[:, None] * columns + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    magnitude = _finite_or_inf(x)
    if HAS_MAXIMUM:
        tl.atomic_max(max_ptr, tl.max(magnitude))
    scaled = tl.minimum(tl.maximum(x * tl.load(scale_ptr), -LARGEST), LARGEST)
    scaled = tl.where(magnitude < float("inf"), scaled, float("nan"))
    cast = scaled.to(cast_ptr.dtype.element_ty)
    tl.store(cast_ptr + at, cast, mask=inside)
    if TRANSPOSES:
        turned = column[:, None] * rows + row[None, :]
        fits = (column[:, None] < columns) & (row[None, :] < rows)
        tl.store(turned_ptr + turned, tl.trans(cast), mask=fits)


@triton.jit
def _transpose_tile(x_ptr, turned_ptr, rows, columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """One tile of x (rows, columns), contiguous, as bytes."""
    column_tiles = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % column_tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=inside, other=0)
    fits = (column[:, None] < columns) & (row[None, :] < rows)
    tl.store(turned_ptr + column[:, None] * rows + row[None, :], tl.trans(x), mask=fits)


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """As `fp8.largest_magnitude`, of all elements."""
    found = torch.zeros((), dtype=torch.float32, device=x.device)
    _maximum[(triton.cdiv(x.numel(), _SPAN),)](x, found, x.numel(), SPAN=_SPAN)
    return found


def cast_both(
    x: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    transposed: bool,
    seen: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`fp8.cast` of x (rows, columns), contiguous, and of its transposed matrix.

    Raises `seen` (), float32, to the largest magnitude of x.
    """
    rows, columns = x.shape
    cast = torch.empty(rows, columns, dtype=dtype, device=x.device)
    turned = torch.empty(columns, rows, dtype=dtype, device=x.device) if transposed else None
    _cast_tile[(triton.cdiv(rows, _TILE) * triton.cdiv(columns, _TILE),)](
        x,
        cast,
        cast if turned is None else turned,
        scale,
        scale if seen is None else seen,
        rows,
        columns,
        LARGEST=torch.finfo(dtype).max,
        TILE=_TILE,
        HAS_MAXIMUM=seen is not None,
        TRANSPOSES=transposed,
        num_warps=4,
    )
    return cast, turned


def transposed(values: torch.Tensor) -> torch.Tensor:
    """A contiguous matrix of an 8-bit type, transposed and row-major."""
    rows, columns = values.shape
    turned = torch.empty(columns, rows, dtype=torch.uint8, device=values.device)
    _transpose_tile[(triton.cdiv(rows, _TILE) * triton.cdiv(columns, _TILE),)](
        values.view(torch.uint8), turned, rows, columns, TILE=_TILE, num_warps=4
    )
    return turned.view(values.dtype)
