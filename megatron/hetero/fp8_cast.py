"""Casts to 8-bit types on GPUs: a matrix, its transposed matrix and its maximum in one pass.

torch._scaled_mm takes a row-major left and a column-major right matrix, so that forward, input
gradient and weight gradient need both orders of every matrix. By plain operations casts and
transpositions take as long as fp8 saves. SwiGLU and its gradient are computed in the same pass, so
that they are never written in 16 bits. Imported on GPUs only; Triton has the same language on both
vendors.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

_TILE_ROWS = 64
_TILE_COLUMNS = {"plain": 128, "swiglu": 128, "swiglu gradient": 64}
"""By what is cast, which `fp8_operands` names."""


@triton.jit
def _load(ptr, at, inside, IS_WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    if IS_WHOLE:
        return tl.load(ptr + at).to(tl.float32)
    return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _rounded(x, ptr):  # type: ignore[no-untyped-def]
    """x as it would be written in the type of `ptr`. Without it Triton 3.6 compiles a transposed
    matrix of which one byte in four is wrong, on Hopper."""
    return x.to(ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _largest(x):  # type: ignore[no-untyped-def]
    """The largest magnitude; infinite where an element is not finite. By bits: a maximum of floats
    would drop NaN, whose bits are above those of infinity."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.minimum(tl.max(bits), 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _put(  # type: ignore[no-untyped-def]
    x,
    scale,
    cast_ptr,
    turned_ptr,
    row,
    column,
    rows,
    columns,
    inside,
    LARGEST: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    TRANSPOSES: tl.constexpr,
):
    """Writes the tile at (row, column) of a matrix (rows, columns), cast, and transposed."""
    i = tl.arange(0, x.shape[0])
    j = tl.arange(0, x.shape[1])
    scaled = tl.minimum(tl.maximum(x * scale, -LARGEST), LARGEST)
    # Adds nothing to what is finite, and NaN to what is not.
    cast = (x * 0.0 + scaled).to(cast_ptr.dtype.element_ty)
    at = i[:, None] * columns + j[None, :]
    ptr = cast_ptr + row * columns + column
    if IS_WHOLE:
        tl.store(ptr + at, cast)
    else:
        tl.store(ptr + at, cast, mask=inside)
    if TRANSPOSES:
        at = j[:, None] * rows + i[None, :]
        ptr = turned_ptr + column * rows + row
        if IS_WHOLE:
            tl.store(ptr + at, tl.trans(cast))
        else:
            tl.store(ptr + at, tl.trans(cast), mask=tl.trans(inside))


@triton.jit
def _cast_tile(  # type: ignore[no-untyped-def]
    x_ptr,
    gate_up_ptr,
    cast_ptr,
    turned_ptr,
    scale_ptr,
    max_ptr,
    scale_step,
    max_step,
    rows,
    columns,
    FORM: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_MAXIMUM: tl.constexpr,
    CASTS: tl.constexpr,
    TRANSPOSES: tl.constexpr,
):
    """One tile of (rows, columns) of what FORM says; of a gradient, the same one of both halves.

    `scale_step` and `max_step`: 1 where each matrix of a stack has its own, else 0.
    """
    matrix = tl.program_id(1).to(tl.int64)
    begin = matrix * rows * columns
    scale_ptr += matrix * scale_step
    max_ptr += matrix * max_step
    cast_ptr += begin
    turned_ptr += begin
    column_tiles = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS
    column = (tl.program_id(0) % column_tiles).to(tl.int64) * COLUMNS
    i = tl.arange(0, ROWS)
    j = tl.arange(0, COLUMNS)
    inside = (row + i[:, None] < rows) & (column + j[None, :] < columns)
    width = columns * 2
    x_at = i[:, None] * columns + j[None, :]
    gate_at = i[:, None] * width + j[None, :]
    x_ptr += begin + row * columns + column
    gate_up_ptr += row * width + column
    if FORM == "swiglu gradient":
        x = _load(x_ptr, x_at, inside, IS_WHOLE)
        gate = _load(gate_up_ptr, gate_at, inside, IS_WHOLE)
        up = _load(gate_up_ptr + columns, gate_at, inside, IS_WHOLE)
        sigmoid = tl.sigmoid(gate)
        grad_gate = _rounded(x * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), gate_up_ptr)
        grad_up = _rounded(x * gate * sigmoid, gate_up_ptr)
        if HAS_MAXIMUM:
            tl.atomic_max(max_ptr, tl.maximum(_largest(grad_gate), _largest(grad_up)))
        if CASTS:
            scale = tl.load(scale_ptr)
            _put(
                grad_gate,
                scale,
                cast_ptr,
                turned_ptr,
                row,
                column,
                rows,
                width,
                inside,
                LARGEST,
                IS_WHOLE,
                TRANSPOSES,
            )
            _put(
                grad_up,
                scale,
                cast_ptr,
                turned_ptr,
                row,
                column + columns,
                rows,
                width,
                inside,
                LARGEST,
                IS_WHOLE,
                TRANSPOSES,
            )
    else:
        if FORM == "swiglu":
            gate = _load(gate_up_ptr, gate_at, inside, IS_WHOLE)
            up = _load(gate_up_ptr + columns, gate_at, inside, IS_WHOLE)
            x = _rounded(gate * tl.sigmoid(gate) * up, gate_up_ptr)
        else:
            x = _load(x_ptr, x_at, inside, IS_WHOLE)
        if HAS_MAXIMUM:
            tl.atomic_max(max_ptr, _largest(x))
        if CASTS:
            _put(
                x,
                tl.load(scale_ptr),
                cast_ptr,
                turned_ptr,
                row,
                column,
                rows,
                columns,
                inside,
                LARGEST,
                IS_WHOLE,
                TRANSPOSES,
            )


def _launch(
    form: str,
    inputs: tuple[torch.Tensor, ...],
    *,
    scale: torch.Tensor | None = None,
    cast: torch.Tensor | None = None,
    turned: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    largest: float = 0.0,
) -> None:
    x, gate_up = inputs[0], inputs[-1]
    *matrices, rows, columns = x.shape
    if form == "swiglu":
        columns //= 2
    tile = _TILE_COLUMNS[form]
    tiles = triton.cdiv(rows, _TILE_ROWS) * triton.cdiv(columns, tile)
    # A pointer that FORM and the other constants leave unread stands in for one that is absent.
    _cast_tile[(tiles, math.prod(matrices))](
        x,
        gate_up,
        x if cast is None else cast,
        x if turned is None else turned,
        x if scale is None else scale,
        x if seen is None else seen,
        0 if scale is None else scale.dim(),
        0 if seen is None else seen.dim(),
        rows,
        columns,
        FORM=form,
        LARGEST=largest,
        ROWS=_TILE_ROWS,
        COLUMNS=tile,
        IS_WHOLE=rows % _TILE_ROWS == 0 and columns % tile == 0,
        HAS_MAXIMUM=seen is not None,
        CASTS=cast is not None,
        TRANSPOSES=turned is not None,
        num_warps=4,
    )


def largest_magnitude(*inputs: torch.Tensor, form: str = "plain") -> torch.Tensor:
    """As `fp8_operands.magnitude`."""
    found = torch.zeros(inputs[0].shape[:-2], dtype=torch.float32, device=inputs[0].device)
    _launch(form, inputs, seen=found)
    return found


def cast_both(
    *inputs: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    form: str = "plain",
    transposed: bool,
    seen: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `fp8_operands.cast_both_ways`, of contiguous inputs."""
    *matrices, rows, columns = inputs[-1].shape
    if form == "swiglu":
        columns //= 2
    device = inputs[0].device
    cast = torch.empty(*matrices, rows, columns, dtype=dtype, device=device)
    turned = None
    if transposed:
        turned = torch.empty(*matrices, columns, rows, dtype=dtype, device=device)
    _launch(
        form,
        inputs,
        scale=scale,
        cast=cast,
        turned=turned,
        seen=seen,
        largest=torch.finfo(dtype).max,
    )
    return cast, turned
