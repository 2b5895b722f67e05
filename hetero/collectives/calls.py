"""One call of a group: how ranks compare theirs, and how errors and the profiler name it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch.autograd import profiler

_HASH_MULTIPLIER = 2654435761
"""Knuth's; odd, so that different sequence numbers give different tags."""
_NO_EVENT: AbstractContextManager[object] = nullcontext()


def profiled(operation: str) -> AbstractContextManager[object]:
    """A range in torch's profiler, while that records, named like NCCL's ("nccl:all_reduce")."""
    if profiler._is_profiler_enabled:
        return profiler.record_function(f"hetero:{operation}")
    return _NO_EVENT


# Bounded: the shapes of a script's calls may be new in every step.
@lru_cache(maxsize=1024)
def _digest(*values: object) -> int:
    return zlib.crc32(repr(values).encode())


@dataclass(slots=True, unsafe_hash=True)
class Call:
    """One operation; equal on all ranks that make the same call."""

    sequence: int
    operation: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """Numbers of elements that all ranks must have alike; empty if they may differ."""
    reduction: str = ""
    root: int | None = None
    """The global rank."""

    def __str__(self) -> str:
        parts = []
        if self.reduction:
            parts.append(self.reduction)
        if self.dtype:
            parts.append(f"{self.dtype} {list(self.shape)}" if self.shape else self.dtype)
        if self.root is not None:
            parts.append(f"root {self.root}")
        details = f" ({', '.join(parts)})" if parts else ""
        return f"{self.operation}{details} as number {self.sequence}"

    @property
    def tag(self) -> int:
        """Goes with each message of the call; a receiver rejects another call's."""
        kind = _digest(self.operation, self.dtype, self.shape, self.reduction, self.root)
        return (kind + self.sequence * _HASH_MULTIPLIER) % (1 << 32)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Call:
        return cls(**{**values, "shape": tuple(values["shape"])})
