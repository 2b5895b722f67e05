"""A file is found by its name: no two of the training program, its tools and examples share one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_no_two_files_share_a_name() -> None:
    folders = ("hetero", "megatron/hetero", "tools", "examples")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    # A command is found by what users type.
    command = ROOT / "tools" / "plan.py"
    names = Counter(f.name for f in files if f.name != "__init__.py" and f != command)
    assert [name for name, count in names.items() if count > 1] == []
