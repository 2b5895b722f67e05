"""The header of every message, which turns a mismatch into an error instead of wrong data."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from hetero.native.binding import MESSAGE_DIMENSIONS, MessageHeader

HEADER_BYTES = ctypes.sizeof(MessageHeader)
_MAGIC = b"HTRO"

# The numbers are part of the protocol: append, never reorder.
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


@dataclass(frozen=True)
class Header:
    """Sequence number, dtype, shape, size and tag of one message of one direction of a link.

    `hetero/native/ring.h` has its layout (struct message_header); C fills in the numbers of most.
    """

    sequence: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    tag: int = 0

    def pack(self) -> bytes:
        if self.dtype not in _CODES:
            raise TypeError(f"a link cannot carry {self.dtype}; give a view of another dtype")
        if len(self.shape) > MESSAGE_DIMENSIONS:
            raise ValueError(
                f"a link carries at most {MESSAGE_DIMENSIONS} dimensions, not {len(self.shape)}; "
                "give a view of fewer"
            )
        header = MessageHeader(
            magic=_MAGIC,
            dtype=_CODES[self.dtype],
            dimensions=len(self.shape),
            sequence=self.sequence,
            nbytes=self.nbytes,
            shape=self.shape,
            tag=self.tag,
        )
        return bytes(header)

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Raises ValueError for bytes that are not a header of this protocol."""
        if len(data) != HEADER_BYTES:
            raise ValueError("the header is cut short or too long")
        header = MessageHeader.from_buffer_copy(data)
        if header.magic != _MAGIC:
            raise ValueError("the header is corrupted (wrong magic)")
        if header.dtype >= len(DTYPES) or header.dimensions > MESSAGE_DIMENSIONS:
            raise ValueError("the header is corrupted (unknown dtype or too many dimensions)")
        return cls(
            sequence=header.sequence,
            dtype=DTYPES[header.dtype],
            shape=tuple(header.shape[: header.dimensions]),
            nbytes=header.nbytes,
            tag=header.tag,
        )


DIFFERENCE_REMEDY = "have both ends send and receive alike: same model, batch, calls"


def difference(arrived: bytes, expected: bytes) -> str | None:
    """Describe the first difference from the expected header; None if there is none."""
    try:
        one, other = Header.unpack(arrived), Header.unpack(expected)
    except ValueError as error:
        return str(error)
    for name in ("sequence", "tag", "dtype", "shape", "nbytes"):
        if getattr(one, name) != getattr(other, name):
            return f"{name} {getattr(one, name)} instead of {getattr(other, name)}"
    return None


@lru_cache(maxsize=64)
def unnumbered_header(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """A message's header with sequence and tag 0: a pipeline's messages repeat it."""
    return Header(0, dtype, tuple(shape), math.prod(shape) * dtype.itemsize).pack()
