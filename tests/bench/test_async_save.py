"""The cost of saving, as bench/async_save.py counts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import async_save
from hetero.tools.runs import Finished
from tests import commands
from tests.bench.test_benchmark_parity import TINY
from tests.commands import ROOT

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

SIZES = {"iterations": 6, "interval": 2}


def finished(seconds: list[float], *ranks: list[tuple[float, float]]) -> Finished:
    """A run: the times of its iterations, and (stood still, memory) of every rank's saves."""
    return Finished(
        iterations=[
            {"iteration": n, "elapsed_ms": s * 1e3} for n, s in enumerate(seconds, start=1)
        ],
        report={
            "ranks": [
                {
                    "saving_seconds": sum(s for s, _ in saves),
                    "saves": [
                        {"stood_still_s": s, "memory_wait_s": m, "written_s": 1.0} for s, m in saves
                    ],
                }
                for saves in ranks
            ]
        },
    )


BARE = finished([9.0, 1.0, 1.0, 1.0, 1.0, 1.0], [], [])


def test_a_save_costs_what_stood_still_and_what_ran_slower() -> None:
    saved = finished(
        [8.0, 1.1, 1.2, 1.0, 1.2, 1.0],
        [(0.9, 0.6), (0.1, 0.0), (0.3, 0.0)],
        [(0.7, 0.7), (0.2, 0.0), (0.2, 0.0)],
    )
    cost = async_save.cost_of(saved, BARE, **SIZES)
    assert async_save.seconds_an_interval(BARE, **SIZES) == pytest.approx(2.0)
    assert cost.iterations_s == pytest.approx(4.4)
    assert cost.slower_a_save_s == pytest.approx(0.2)
    # Save by save, the rank that stood longest: 0.9, 0.2 and 0.3.
    assert cost.later_stood_still_s == pytest.approx(0.25)
    assert cost.later_cost == pytest.approx((0.2 + 0.25) / 2.0)
    assert cost.first_stood_still_s == pytest.approx(0.9)
    assert cost.first_memory_wait_s == pytest.approx(0.7)
    assert cost.one_off_s == pytest.approx(0.65)
    assert cost.before_first_slower_s == pytest.approx(0.1)


def test_the_table_says_what_the_cost_is_a_share_of() -> None:
    saved = finished([8.0, *[1.0] * 5], [(0.5, 0.4), (0.02, 0.0), (0.02, 0.0)])
    cost = async_save.cost_of(saved, BARE, **SIZES)
    text = async_save.table({"async": cost}, between=2.0, interval=2)
    assert "a save every 2.00 s (2 iterations)" in text
    assert text.splitlines()[-1].split() == [
        "async", "0.020", "0.000", "1.00%", "0.500", "0.400", "0.480", "0.000",
    ]  # fmt: skip


def test_a_save_that_failed_is_no_measure() -> None:
    saved = finished([1.0] * 6, [(0.1, 0.0)] * 3)
    saved.report["ranks"][0]["saves"][1]["written_s"] = None
    with pytest.raises(SystemExit, match=r"2\. save"):
        async_save.cost_of(saved, BARE, **SIZES)


@pytest.mark.slow
def test_two_kinds_on_the_cpu(tmp_path: Path) -> None:
    sizes = f"{TINY} --vocab-size 320 --padded-vocab-size 384"
    words = f"--kinds none async --iterations 6 --interval 2 -- {sizes}".split()
    assert "(2 iterations)" in commands.printed(ROOT / "bench" / "async_save.py", tmp_path, *words)
    record = json.loads((tmp_path / "async_save.json").read_text())
    assert list(record["runs"]) == ["none", "async"]
    assert record["seconds_between_saves"] > 0
    for rank in record["runs"]["async"]["ranks"]:
        assert [save["iteration"] for save in rank["saves"]] == [2, 4, 6]
    assert not list(tmp_path.glob("saved-*"))
