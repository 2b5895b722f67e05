"""Products in fp8 that are added to float32 by cuBLASLt itself.

torch._scaled_mm writes a weight gradient to be read again and added: of LLaMA-8B's layers and
micro-batches of 4,096 tokens that takes two fifths of the product's own time. cuBLASLt adds in the
product's epilogue, but torch has no argument for it. Imported on NVIDIA's GPUs only; the library is
the one that torch has loaded.

Names and numbers are those of cublasLt.h.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch

_COMPUTE_32F = 68
_TRANSA, _A_SCALE_POINTER, _B_SCALE_POINTER = 3, 17, 18
_OP_T = 1
_PREF_MAX_WORKSPACE_BYTES = 1
_DATA_TYPES = {torch.float32: 0, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_WORKSPACE_BYTES = 32 << 20
_LIBRARY = "libcublasLt.so.{major}"


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algo", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class CublasLtError(RuntimeError):
    """A call of cuBLASLt has returned an error."""


@dataclass(frozen=True)
class _Plan:
    """A product of these shapes and types, as cuBLASLt describes it."""

    description: c_void_p
    left: c_void_p
    right: c_void_p
    out: c_void_p
    algorithm: _Heuristic


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise CublasLtError(f"{name} returned status {status}")


@cache
def _library() -> ctypes.CDLL:
    major = str(torch.version.cuda).partition(".")[0]
    try:
        return ctypes.CDLL(_LIBRARY.format(major=major))
    except OSError as error:
        raise CublasLtError(str(error)) from error


@cache
def _handle(device: torch.device) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", byref(handle))
    return handle


@cache
def _workspace(device: torch.device) -> torch.Tensor:
    # Products of a device that share it follow one another on one stream.
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
    """Of a column-major matrix."""
    layout = c_void_p()
    sizes = c_uint64(rows), c_uint64(columns), c_int64(rows)
    _call("cublasLtMatrixLayoutCreate", byref(layout), _DATA_TYPES[dtype], *sizes)
    return layout


def _set(description: c_void_p, attribute: int, value: c_int | c_void_p) -> None:
    size = c_size_t(ctypes.sizeof(value))
    _call("cublasLtMatmulDescSetAttribute", description, attribute, byref(value), size)


@cache
def _plan(
    device: torch.device, left: torch.dtype, right: torch.dtype, m: int, n: int, k: int
) -> _Plan:
    """Of a row-major sum (m, n) += left (m, k) times right (n, k) transposed.

    To cuBLASLt, whose matrices are column-major, that is sum (n, m) += right (k, n) transposed
    times left (k, m).
    """
    description, preference = c_void_p(), c_void_p()
    _call("cublasLtMatmulDescCreate", byref(description), _COMPUTE_32F, _DATA_TYPES[torch.float32])
    _set(description, _TRANSA, c_int(_OP_T))
    # The algorithm depends on whether there are scales; which ones is said at every call.
    for attribute in (_A_SCALE_POINTER, _B_SCALE_POINTER):
        _set(description, attribute, c_void_p(_workspace(device).data_ptr()))
    layouts = _layout(right, k, n), _layout(left, k, m), _layout(torch.float32, n, m)
    _call("cublasLtMatmulPreferenceCreate", byref(preference))
    size = c_size_t(_WORKSPACE_BYTES)
    _call(
        "cublasLtMatmulPreferenceSetAttribute",
        preference,
        _PREF_MAX_WORKSPACE_BYTES,
        byref(size),
        c_size_t(ctypes.sizeof(size)),
    )
    found, count = _Heuristic(), c_int()
    matrices = (*layouts, layouts[2])
    _call(
        "cublasLtMatmulAlgoGetHeuristic",
        _handle(device),
        description,
        *matrices,
        preference,
        1,
        byref(found),
        byref(count),
    )
    _call("cublasLtMatmulPreferenceDestroy", preference)
    if not count.value:
        raise CublasLtError("cublasLtMatmulAlgoGetHeuristic knows no algorithm")
    return _Plan(description, *layouts, algorithm=found)


def add_product(
    total: torch.Tensor,
    *,
    left: torch.Tensor,
    right: torch.Tensor,
    left_inverse: torch.Tensor,
    right_inverse: torch.Tensor,
) -> None:
    """total (m, n), float32, += left (m, k) times right (n, k) transposed, times both inverses ().

    All matrices are row-major; left and right are in 8-bit types. On the current stream. Raises
    CublasLtError where cuBLASLt does not take them.
    """
    (m, k), n = left.shape, right.shape[0]
    plan = _plan(total.device, left.dtype, right.dtype, m, n, k)
    _set(plan.description, _A_SCALE_POINTER, c_void_p(right_inverse.data_ptr()))
    _set(plan.description, _B_SCALE_POINTER, c_void_p(left_inverse.data_ptr()))
    one = byref(c_float(1.0))
    out = c_void_p(total.data_ptr())
    _call(
        "cublasLtMatmul",
        _handle(total.device),
        plan.description,
        one,
        c_void_p(right.data_ptr()),
        plan.left,
        c_void_p(left.data_ptr()),
        plan.right,
        one,
        out,
        plan.out,
        out,
        plan.out,
        byref(plan.algorithm.algo),
        c_void_p(_workspace(total.device).data_ptr()),
        c_size_t(_WORKSPACE_BYTES),
        c_void_p(torch.cuda.current_stream(total.device).cuda_stream),
    )
