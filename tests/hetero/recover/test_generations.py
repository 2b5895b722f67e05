"""A writer's view of its node's generations."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.recover import generations as module
from hetero.recover.generations import Generations


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one number is the time."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_copy_is_awaited_as_long_as_more_of_it_arrives(tmp_path: Path, clock) -> None:
    generations = Generations(tmp_path, copies_of=[1])
    generations.complete(10)
    coming = tmp_path / "of_1" / "iter_0000010.saving"
    coming.mkdir(parents=True)
    file = coming / "rank_00001.safetensors"
    for size in range(1, 5):
        clock[0] += 50.0
        file.write_bytes(b"x" * 8192 * size)
        assert generations.awaits_copies()
    clock[0] += 50.0
    assert generations.awaits_copies()
    clock[0] += 50.0
    assert not generations.awaits_copies(), "nothing came for 60 s"
    file.write_bytes(b"x" * 8192 * 6)
    assert generations.awaits_copies(), "it goes on"
    coming.rename(tmp_path / "of_1" / "iter_0000010")
    assert not generations.awaits_copies()


def test_the_next_generation_is_awaited_for_its_own_time(tmp_path: Path, clock) -> None:
    generations = Generations(tmp_path, copies_of=[1])
    assert not generations.awaits_copies()
    generations.complete(10)
    clock[0] += 70.0
    assert not generations.awaits_copies()
    generations.complete(20)
    assert generations.awaits_copies()
