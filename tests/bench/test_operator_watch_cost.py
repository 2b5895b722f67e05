"""bench/operator_watch_cost.py: blocks with a check beside their neighbours without."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import pytest

from bench import operator_watch_cost
from bench.operator_watch_cost import blocks, summary


def begun(*steps: float) -> list[float]:
    """When each step began, and when the last ended."""
    return list(accumulate(steps, initial=5.0))


def test_a_block_is_a_checked_step_and_the_next_between_neighbours_without() -> None:
    # The fourth and the eighth step have a check, which the steps after them feel.
    steps = [9, 1, 1, 3, 2, 2, 2, 6, 3, 3, 3]
    assert blocks(begun(*steps)) == [{"with": 5, "without": 3}, {"with": 9, "without": 5}]


def test_a_check_without_a_neighbour_behind_it_is_not_counted() -> None:
    assert len(blocks(begun(*[1] * 7))) == 1
    assert blocks(begun(*[1] * 6)) == []


def test_a_drift_of_the_machine_is_no_cost() -> None:
    slower = [1.0 + 0.01 * step for step in range(100)]
    for pair in blocks(begun(*slower)):
        assert pair["with"] == pytest.approx(pair["without"])


def test_a_cost_is_that_of_a_check_over_the_iterations_between() -> None:
    found = summary([{"with": 0.25, "without": 0.2}] * 9)
    assert (found["step_without_ms"], found["check_ms"]) == (100.0, 50.0)
    assert found["per_cent_at_100"] == 0.5
    assert found["check_error_ms"] == 0.0


@pytest.mark.slow
def test_a_run_is_timed_on_both_ranks(tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    assert operator_watch_cost.main(["--json", str(out), "--checks", "3"]) == 0
    ranks = json.loads(out.read_text())["ranks"]
    assert [len(rank["pairs"]["wall_seconds"]) for rank in ranks] == [3, 3]
