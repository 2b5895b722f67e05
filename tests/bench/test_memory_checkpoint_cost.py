"""bench/memory_checkpoint_cost.py: what counts, and which rank is told of."""

from __future__ import annotations

import os
from typing import Any

import pytest

from bench.memory_checkpoint_cost import cost, counted, line
from hetero.errors import HeteroError


def written(*seconds: float, failed: bool = False) -> dict[str, Any]:
    order = (True, False, False, True)
    blocks = [
        {"is_on": order[number % 4], "wall_seconds": spent} for number, spent in enumerate(seconds)
    ]
    saves = [
        {
            "iteration": i,
            "stood_still_s": i * 1e-3,
            "written_s": None if failed else 1.0,
            "bytes": i,
        }
        for i in (1, 31, 41, 51, 71)
    ]
    return {"blocks": blocks, "saves": saves}


def test_the_first_blocks_and_their_generations_are_left_out() -> None:
    found = counted(written(*[9.0] * 4, 1.1, 1.0, 1.0, 1.1), steps=10)
    assert [block["wall_seconds"] for block in found.blocks] == [1.1, 1.0, 1.0, 1.1]
    assert found.stood_still == pytest.approx([0.041, 0.051, 0.071])
    told = cost(found, interval=10)
    assert told["pairs"]["median"] == pytest.approx(10.0)
    assert told["seconds_a_step"] == pytest.approx(0.1)
    assert told["stood_still_seconds"] == pytest.approx(0.051)


def test_a_generation_that_failed_measures_nothing() -> None:
    with pytest.raises(HeteroError, match="a generation of a run failed"):
        counted(written(*[1.0] * 8, failed=True), steps=10)


def test_the_rank_that_it_cost_most_is_told_with_the_target() -> None:
    ranks = [counted(written(*[9.0] * 4, on, 1.0, 1.0, on), steps=10) for on in (1.01, 1.02)]
    said = line(10, [cost(rank, interval=10) for rank in ranks])
    assert "every 10 steps of 100.0 ms: +2.00 %" in said
    assert "target 1 %" in said
    assert "target" not in line(1, [cost(ranks[0], interval=1)])


def test_a_block_that_is_on_begins_with_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BLOCK_STEPS", "10"), ("BLOCK_INTERVAL", "5"), ("BLOCKS_FOLDER", "x")):
        monkeypatch.setitem(os.environ, name, value)
    from bench.memory_checkpoint import alternating

    assert [i for i in range(1, 51) if alternating.is_due(i)] == [1, 6, 31, 36, 41, 46]
