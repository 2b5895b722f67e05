"""Weight gradients of grouped products, added to float32 buffers by one Triton kernel.

torch's grouped product writes them in half precision, to be read again and added: for experts of a
few hundred tokens each that moves half as many bytes again as the sum itself, and rounds every
micro-batch. Imported on GPUs only; Triton has the same language on both vendors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_products(  # type: ignore[no-untyped-def]
    sum_ptr,
    grad_ptr,
    input_ptr,
    ends_ptr,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """sum (groups, rows, columns) += grad (tokens, rows) transposed times input (tokens, columns),
    by tiles of one group each."""
    group = tl.program_id(1)
    column_tiles = tl.cdiv(columns, COLUMNS)
    row = tl.program_id(0) // column_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(begin, end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        is_own = token[:, None] < end
        grads = tl.load(
            grad_ptr + token[:, None].to(tl.int64) * rows + row[None, :],
            mask=is_own & (row[None, :] < rows),
            other=0.0,
        )
        inputs = tl.load(
            input_ptr + token[:, None].to(tl.int64) * columns + column[None, :],
            mask=is_own & (column[None, :] < columns),
            other=0.0,
        )
        total = tl.dot(tl.trans(grads), inputs, total)
    if begin < end:
        at = sum_ptr + (group.to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        tl.store(at, tl.load(at, mask=inside) + total, mask=inside)


def add_grouped_wgrad(
    main_grad: torch.Tensor,
    *,
    grad_output_tn: torch.Tensor,
    input_tk: torch.Tensor,
    ends: torch.Tensor,
) -> None:
    """main_grad (groups, n, k), float32, += of each group grad_output transposed times input.

    The other tensors are contiguous and of one 16-bit dtype. The rows of a group are consecutive;
    `ends` (groups,), int32, is the row after its last one.
    """
    groups, rows, columns = main_grad.shape
    tile = {"ROWS": 128, "COLUMNS": 128, "TOKENS": 64}
    tiles = triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(columns, tile["COLUMNS"])
    _add_products[(tiles, groups)](
        main_grad,
        grad_output_tn,
        input_tk,
        ends,
        rows,
        columns,
        **tile,
        num_warps=4,
        num_stages=3,
    )
