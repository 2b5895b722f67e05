"""Tables of launches: flags that are added to the smallest one (launches.py), and what comes of it.

A section names what it is about and, with bars between, the flags left out of the launch (without),
the number of ranks (world) and flags of all its lines (with). Then FLAGS => RESULT.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Launch:
    """A line of a table, with what its section says."""

    flags: str
    result: str
    base: str
    without: str
    world_size: int

    def __str__(self) -> str:
        return self.flags


def read_table(name: str) -> Iterator[Launch]:
    """The lines of a table in this folder."""
    section: dict[str, str] = {}
    for line in Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = dict(part.split(" ", 1) for part in line.strip("[]").split(" | ")[1:])
        elif line and not line.startswith("#"):
            flags, _, result = line.rpartition("=> ")
            base, without = section.get("with", ""), section.get("without", "")
            yield Launch(flags.strip(), result, base, without, int(section.get("world", 1)))
