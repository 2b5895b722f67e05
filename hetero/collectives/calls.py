"""What a rank calls: one operation of a group, as it is compared with the others' and told."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

HEADER_BYTES = 256
_DIGEST_BYTES = 16


@dataclass(frozen=True)
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

    def header(self) -> bytes:
        """What goes in front of a message: a digest that is compared, and text that is shown."""
        text = str(self).encode()[: HEADER_BYTES - _DIGEST_BYTES]
        digest = hashlib.blake2s(repr(self).encode(), digest_size=_DIGEST_BYTES).digest()
        return (digest + text).ljust(HEADER_BYTES, b"\0")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Call:
        return cls(**{**values, "shape": tuple(values["shape"])})


def header_text(header: bytes) -> str:
    """The part of a header that people read."""
    return header[_DIGEST_BYTES:].rstrip(b"\0").decode(errors="replace")
