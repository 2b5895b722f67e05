"""The project's version, its protocol's, and the releases of megatron-core that it supports."""

from __future__ import annotations

import sys
import zlib
from functools import cache
from pathlib import Path

__version__ = "0.1.0"
"""Both sides of a boundary must run the same one."""

PROTOCOL_VERSION = 6
"""Of what ranks send each other over links (docs/wire.md). Increment it with every change."""

MEGATRON_CORES = ("0.16.1", "0.17.0", "0.17.1", "0.18.0", "0.18.2", "0.19.0")
"""The releases that `make test-versions` runs the tests on, oldest first. Their publisher withdrew
0.18.1 and 0.19.1. The range in requirements.txt holds these and no other of today's releases."""


def newest_core(python: tuple[int, int] = sys.version_info[:2]) -> str:
    """The newest supported megatron-core that installs on a Python: 0.17 and later need 3.12."""
    return MEGATRON_CORES[-1 if python >= (3, 12) else 0]


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
