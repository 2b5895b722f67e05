"""bench/record_cost.py: pairs of blocks with the record and without, and what it counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import record_cost
from bench.record_cost import RankBlocks, counted, ratios, snapshot_microseconds, summary


def blocks(*seconds: float) -> list[dict[str, Any]]:
    order = (True, False, False, True)
    return [
        {"is_on": order[number % 4], "cpu_seconds": spent} for number, spent in enumerate(seconds)
    ]


def test_a_pair_is_two_neighbours_whichever_came_first() -> None:
    found = ratios(blocks(1.1, 1.0, 2.0, 2.2, 1.0, 1.0), "cpu_seconds")
    assert found == pytest.approx([0.1, 0.1, 0.0])


def test_a_summary_is_in_per_cent_with_the_error_of_its_median() -> None:
    of_few, of_many = (summary([0.001, 0.002, 0.003, 0.004, 0.005] * n) for n in (1, 100))
    assert of_few["median"] == of_many["median"] == 0.3
    assert of_many["error"] < of_few["error"] / 9


def test_what_is_counted_is_calls_times_costs_over_a_step() -> None:
    parts = {
        "start": {"calls_a_step": 10.0, "microseconds_of_a_call": 2.0},
        "add_call": {"calls_a_step": 5.0, "microseconds_of_a_call": 4.0},
    }
    found = counted(RankBlocks([], parts), snapshot=500.0, seconds_a_step=0.040)
    assert found["microseconds_a_step"] == 40.0
    assert found["per_cent_of_a_step"] == pytest.approx(0.1 + 0.05)


def test_a_snapshot_takes_some_time() -> None:
    assert snapshot_microseconds() > 0


@pytest.mark.slow
def test_a_run_alternates_and_is_counted_on_both_ranks(tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    assert record_cost.main(["--json", str(out), "--pairs", "8", "--steps", "2"]) == 0
    written = json.loads(out.read_text())
    assert written["simulated"] is True
    for rank in written["ranks"]:
        assert [block["is_on"] for block in rank["blocks"]] == [True, False, False, True] * 4
        parts = rank["parts"]
        assert parts["start"]["calls_a_step"] == parts["stop"]["calls_a_step"] > 20
        assert parts["begin_wait"]["calls_a_step"] > 0
        assert rank["counted"]["microseconds_a_step"] > 0
