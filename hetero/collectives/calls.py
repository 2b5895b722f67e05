"""What a rank calls: one operation of a group, as it is compared with the others' and told."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch.autograd import profiler

_SPREAD = 2654435761
"""Odd, so that numbers of calls give different tags."""


_NO_EVENT: AbstractContextManager[object] = nullcontext()


def profiled(operation: str) -> AbstractContextManager[object]:
    """An event of torch's profiler while that records, named as those of NCCL are."""
    if profiler._is_profiler_enabled:
        return profiler.record_function(f"hetero:{operation}")
    return _NO_EVENT


@cache
def _digest(*values: object) -> int:
    return zlib.crc32(repr(values).encode())


@dataclass(slots=True)
class Call:
    """One operation. Ranks that call the same have equal calls, but for what is each one's own."""

    sequence: int
    operation: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """Of what every rank has alike; empty where the ranks' shapes may differ."""
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
        """What tells its messages from those of other calls."""
        kind = _digest(self.operation, self.dtype, self.shape, self.reduction, self.root)
        return (kind + self.sequence * _SPREAD) % (1 << 32)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Call:
        return cls(**{**values, "shape": tuple(values["shape"])})
