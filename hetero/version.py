"""The project's version, its protocol's, and megatron-core's that it is written for."""

from __future__ import annotations

import zlib
from functools import cache
from pathlib import Path

__version__ = "0.1.0"
"""Both sides of a boundary must run the same one."""

PROTOCOL_VERSION = 6
"""Of what ranks send each other over links (docs/wire.md). Increment it with every change."""

MEGATRON_CORE = "0.16.1"


@cache
def sources(root: Path = Path(__file__).parents[1]) -> str:
    """A name for the code itself, which checkouts of one version may differ in: `sources 1a2b3c4d`.

    It is of the Python files that a job runs, below `root`, and takes a few milliseconds.
    """
    digest = 0
    for folder in ("hetero", "megatron/hetero"):
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix().encode()
            digest = zlib.crc32(path.read_bytes(), zlib.crc32(name, digest))
    return f"sources {digest:08x}"
