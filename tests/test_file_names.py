"""A file is found by its name: no two of the training program, its tools and examples share one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_no_two_files_share_a_name() -> None:
    folders = ("hetero", "megatron/training", "tools", "examples")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    names = Counter(file.name for file in files if file.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []
