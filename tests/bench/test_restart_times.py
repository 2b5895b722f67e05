"""bench/restart_times.py and bench/goodput.py: what they read of a run and make of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench.goodput import faults
from bench.restart_times import layers_of, summary, table
from bench.restarts.job import Steps
from tests.distributed.harness import wait_for


def rows(*iterations: int, ms: float, loss: float = 2.0) -> str:
    records = ({"iteration": n, "elapsed_ms": ms, "loss": loss} for n in iterations)
    return "".join(json.dumps(record) + "\n" for record in records)


def test_steps_that_a_restart_cuts_off_are_not_current_and_count_once_trained_again(
    tmp_path: Path,
) -> None:
    file, cut = tmp_path / "metrics.jsonl", tmp_path / "cut"
    steps = Steps(file)
    try:
        file.write_text(rows(1, 2, 3, 4, ms=100.0))
        wait_for(lambda: steps.current == 4, seconds=30, what="four steps")
        first = dict(steps.seen)
        cut.write_text(rows(1, 2, ms=100.0))
        os.replace(cut, file)
        wait_for(lambda: steps.reached == [4], seconds=30, what="a restart")
        wait_for(lambda: steps.current == 2, seconds=30, what="the steps that are left")
        with file.open("a") as more:
            more.write(
                rows(3, ms=300.0) + rows(4, ms=300.0, loss=2.2) + rows(5, ms=300.0, loss=9.0)
            )
        wait_for(lambda: steps.current == 5, seconds=30, what="new steps")
    finally:
        steps.close()
    assert steps.seconds == {1: 0.1, 2: 0.1, 3: 0.3, 4: 0.3, 5: 0.3}
    assert {n: steps.seen[n] for n in first} == first
    assert steps.loss_difference == pytest.approx(0.1)


def test_the_fallback_has_all_layers_of_the_model_whichever_flags_say_them() -> None:
    assert layers_of([]) == 4
    assert layers_of(["--num-layers", "16", "--hidden-size", "2048"]) == 16
    assert layers_of(["--num-layers=16"]) == 16


def test_a_fault_comes_in_each_interval_and_is_the_same_for_the_same_seed() -> None:
    drawn = faults(seconds=1800.0, every=120.0, seed=1)
    assert [int(when // 120.0) for when, _ in drawn] == list(range(15))
    assert {rank for _, rank in drawn} == {0, 1}
    assert drawn == faults(seconds=1800.0, every=120.0, seed=1)
    assert drawn != faults(seconds=1800.0, every=120.0, seed=2)
    assert max(rank for _, rank in faults(seconds=6000.0, every=60.0, seed=1, ranks=8)) == 7


def test_the_rest_of_a_try_is_what_no_part_accounts_for() -> None:
    def one(seconds: float, start: float) -> dict[str, Any]:
        parts = {"detection": 0.5, "start": start}
        return {"seconds": seconds, "parts": parts, "repeated_steps": 3}

    tries = [one(4.0, 2.0), one(5.0, 3.0), one(9.0, 6.0)]
    found = summary(tries)
    assert found["median"] == 5.0
    assert found["extremes"] == [4.0, 9.0]
    assert found["parts"] == {"detection": 0.5, "start": 3.0, "rest": 1.5}
    (row,) = table({"rank": {"tries": tries, "summary": found}}).splitlines()[2:]
    assert row == "| rank | 3 | 5.0 s | 4.0, 9.0 | 0.5 |  |  | 3.0 |  |  | 1.5 | 6 s |"
