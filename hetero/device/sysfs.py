"""Reads small files of /sys and /proc, any of which may be missing or unreadable."""

from __future__ import annotations

import re
from pathlib import Path


def entries(folder: Path) -> list[str]:
    """The names in a folder, mlx5_2 before mlx5_10; empty where there is no such folder."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return []
    return sorted(names, key=_natural)


def read_text(file: Path) -> str:
    """The text of a small file without its newline; empty where it cannot be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_integer(file: Path) -> int | None:
    """The whole number a file holds; None where it holds none, or a negative one for 'unknown'."""
    text = read_text(file)
    return int(text) if text.isdecimal() else None


def _natural(name: str) -> list[tuple[str, int]]:
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]
