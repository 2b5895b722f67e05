"""What a node has left for files in memory, by whichever limit is the least."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from hetero.recover import free_memory
from hetero.recover.free_memory import free_bytes, held_bytes

GIB = 1 << 30


def container(folder: Path, *, limit: str) -> None:
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(str(3 * GIB))
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")


def test_a_containers_limit_counts_without_what_the_kernel_only_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_memory, "_CGROUP", tmp_path)
    unlimited = free_bytes(tmp_path)
    assert 0 < unlimited <= psutil.virtual_memory().total
    container(tmp_path, limit=str(3 * GIB + 4096))
    assert free_bytes(tmp_path) == min(unlimited, GIB + 4096) or unlimited < GIB + 4096
    container(tmp_path, limit="max")
    assert free_bytes(tmp_path) > GIB + 4096 or unlimited <= GIB + 4096
    container(tmp_path, limit=str(GIB))
    assert free_bytes(tmp_path) == 0


def test_a_file_of_two_names_counts_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(bytes(1000))
    (tmp_path / "other").write_bytes(bytes(10))
    os.link(tmp_path / "a" / "file", tmp_path / "again")
    assert held_bytes(tmp_path) == 1010
