"""What each operation gives, computed by one rank from every rank's input."""

from __future__ import annotations

import functools
import hashlib

import torch
import torch.distributed as dist

REDUCTIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (torch.bool, *INTEGERS, *FLOATS, *COMPLEX)
FACTOR = 0.5

_TORCH = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def exists(name: str, dtype: torch.dtype) -> bool:
    """Returns True if a reduction is defined for a dtype."""
    if dtype is torch.bool:
        return name not in ("AVG", "PREMUL_SUM")
    if dtype in INTEGERS:
        return name != "PREMUL_SUM"
    if dtype in FLOATS:
        return name not in ("BAND", "BOR", "BXOR")
    return name in ("SUM", "AVG", "PREMUL_SUM")


def op_of(name: str) -> dist.ReduceOp:
    if name == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(FACTOR)
    return getattr(dist.ReduceOp, name)


def given(rank: int, shape: tuple[int, ...], dtype: torch.dtype, *, seed: int) -> torch.Tensor:
    """A rank's input, known to all. Small numbers, so that no product overflows by much."""
    device = torch.get_default_device()
    with torch.device("cpu"):
        return _given(shape, dtype, torch.Generator().manual_seed(1000 * seed + rank)).to(device)


def _given(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype in INTEGERS:
        low = 0 if dtype is torch.uint8 else -3
        return torch.randint(low, 4, shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if dtype in COMPLEX:
        return torch.complex(values, values.flip(0)).to(dtype)
    return values.to(dtype)


def reduced(name: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Floats in double precision; integers exactly, as they wrap around."""
    dtype = inputs[0].dtype
    if dtype is torch.bool:
        wide = [tensor.to(torch.uint8) for tensor in inputs]
        name = {"SUM": "MAX", "PRODUCT": "MIN"}.get(name, name)
        return functools.reduce(_TORCH[name], wide).bool()
    wide = inputs
    if dtype in FLOATS:
        wide = [tensor.double() for tensor in inputs]
    elif dtype in COMPLEX:
        wide = [tensor.to(torch.complex128) for tensor in inputs]
    if name == "PREMUL_SUM":
        wide = [tensor * FACTOR for tensor in wide]
    result = functools.reduce(_TORCH[name], wide)
    if name == "AVG":
        mode = "trunc" if dtype in INTEGERS else None
        result = torch.div(result, len(inputs), rounding_mode=mode)
    return result


def assert_near(result: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal where the arithmetic is exact, and to the dtype's rounding where it is not."""
    if not result.dtype.is_floating_point and not result.dtype.is_complex:
        assert torch.equal(result, expected.to(result.dtype)), what
        return
    epsilon = torch.finfo(result.dtype).eps
    wide = result.to(expected.dtype)
    assert torch.allclose(wide, expected, rtol=16 * epsilon, atol=16 * epsilon), (
        f"{what}: {(wide - expected).abs().max()}"
    )


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2s(flat.cpu().numpy().tobytes()).hexdigest()
