"""What a launcher and ranks share of a checkpoint's files."""

from __future__ import annotations

import os

import pytest

from hetero.recover.stored_files import io_threads


@pytest.mark.parametrize(
    ("bound_to", "of_host", "ranks", "threads"),
    [
        (16, 16, 2, 4),
        (16, 16, 8, 2),
        (2, 2, 8, 1),
        pytest.param(3, 16, 8, 3, id="cores of its own"),
        pytest.param(8, 16, 8, 4, id="many cores of its own"),
    ],
)
def test_a_rank_uses_its_own_cores_or_its_share_of_the_hosts(
    monkeypatch: pytest.MonkeyPatch, bound_to: int, of_host: int, ranks: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(bound_to)))
    monkeypatch.setattr(os, "cpu_count", lambda: of_host)
    assert io_threads({"LOCAL_WORLD_SIZE": str(ranks)}) == threads
