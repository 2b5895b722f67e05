"""What the ranks tell in one phase of their agreement, folded into one value that stays small.

Most of what thousands of ranks tell is the same: versions, flags, results of checks. Folded, each
distinct value of a field stands once, beside the list of who told it.
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
    """What one rank tells."""

    rank: int
    phase: str
    fields: dict[str, str]
    """By name, each value as JSON: most are equal, and those are read once."""
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
    """The records of lines that were appended one after another, in the order of their ranks."""
    return sorted((Record(*json.loads(line)) for line in data.splitlines()), key=lambda r: r.rank)


def fold(records: Sequence[Record]) -> dict[str, Any]:
    """The fields of all records: distinct values, and which of them each record has."""
    names = dict.fromkeys(name for record in records for name in record.fields)
    return {name: _column([record.fields.get(name) for record in records]) for name in names}


def _column(values: Sequence[str | None]) -> list[Any]:
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return [list(numbers), [numbers[value] for value in values] if len(numbers) > 1 else None]


def unfold(columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The payloads of `count` records. Equal values are one object: they are there to be read."""
    payloads: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, (values, numbers) in columns.items():
        read = [None if value is None else json.loads(value) for value in values]
        told = [value is not None for value in values]
        for payload, number in zip(payloads, numbers or [0] * count, strict=True):
            if told[number]:
                payload[name] = read[number]
    return payloads


def pack(value: Mapping[str, Any]) -> str:
    """As text, which every store takes. One limits what is set, to 8 MiB, and not what grows."""
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
