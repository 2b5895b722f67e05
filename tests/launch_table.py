"""Tables of command lines in text files: a line each, `FLAGS => WHAT COMES OF IT`.

A section names what its lines are about and, with bars between, what holds for all of them: the
flags left out of the launch (without), the number of ranks (world), flags before their own (with).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Launch:
    """A line of a table, with what its section says."""

    section: str
    flags: str
    result: str
    base: str
    without: str
    world_size: int

    def __str__(self) -> str:
        return self.flags or self.section


def read_table(path: Path) -> Iterator[Launch]:
    section, holds = "", {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section, *parts = line.strip("[]").split(" | ")
            holds = dict(part.split(" ", 1) for part in parts)
        elif line and not line.startswith("#"):
            flags, _, result = line.rpartition("=> ")
            base, without = holds.get("with", ""), holds.get("without", "")
            world_size = int(holds.get("world", 1))
            yield Launch(section, flags.strip(), result, base, without, world_size)
