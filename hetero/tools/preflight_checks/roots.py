"""Where the kernel tells about the machine; a test points these at a tree of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_TOOL_SECONDS = 10.0

Tool = Callable[[Sequence[str]], str]
"""Runs a vendor's program and returns what it prints; empty where it is absent or fails."""


@dataclass(frozen=True)
class Roots:
    """The folders that are read."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    boot: Path = Path("/boot")

    @classmethod
    def below(cls, folder: Path) -> Roots:
        return cls(folder / "sys", folder / "proc", folder / "dev", folder / "boot")


def run_tool(command: Sequence[str]) -> str:
    """What a program prints; empty where it is not installed, fails, or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
