"""What the ranks submit in one phase of an agreement, and its compact encoding.

Most of what thousands of ranks submit is the same: versions, flags, results of checks. Folded, each
distinct value of a field is stored once, with the ranks' indices into the distinct values.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Record:
    """What one rank submits."""

    rank: int
    phase: str
    fields: dict[str, str]
    """By name; values as JSON, so that equal ones are decoded once."""
    error: str | None

    @classmethod
    def of(
        cls, rank: int, phase: str, payload: Mapping[str, Any] | None, error: str | None
    ) -> Record:
        fields = {name: json.dumps(value) for name, value in (payload or {}).items()}
        return cls(rank, phase, fields, error)

    def line(self) -> str:
        return json.dumps([self.rank, self.phase, self.fields, self.error]) + "\n"


def read_lines(data: bytes) -> list[Record]:
    """The records of appended lines, in the order of ranks."""
    return sorted((Record(*json.loads(line)) for line in data.splitlines()), key=lambda r: r.rank)


def fold(records: Sequence[Record]) -> dict[str, Any]:
    """By field: the distinct values, and which of them each record has (None: all the first)."""
    names = dict.fromkeys(name for record in records for name in record.fields)
    return {name: _column([record.fields.get(name) for record in records]) for name in names}


def _column(values: Sequence[str | None]) -> list[Any]:
    index = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return [list(index), [index[value] for value in values] if len(index) > 1 else None]


def unfold(columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The payloads of `count` records. Never modify a value: equal ones are the same object."""
    payloads: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, (values, indices) in columns.items():
        decoded = [None if value is None else json.loads(value) for value in values]
        for payload, index in zip(payloads, indices or [0] * count, strict=True):
            if values[index] is not None:
                payload[name] = decoded[index]
    return payloads


def pack(value: Mapping[str, Any]) -> str:
    """Compressed, because TCPStore limits a value that is set to 8 MiB; as text for any store."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode(), 1)).decode()


def unpack(data: bytes) -> dict[str, Any]:
    return dict(json.loads(zlib.decompress(base64.b64decode(data))))


def errors_by_text(records: Iterable[Record]) -> dict[str, list[int]]:
    """The ranks of each distinct error."""
    errors: dict[str, list[int]] = {}
    for record in records:
        if record.error:
            errors.setdefault(record.error, []).append(record.rank)
    return errors
