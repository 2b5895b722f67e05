"""docs/benchmarks/async_save.py: what it counts as the cost of a save, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests import commands, scripts
from tools.runs import ROOT, Finished

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

SCRIPT = ROOT / "docs" / "benchmarks" / "async_save.py"
SIZES = {"iterations": 6, "interval": 2}


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return scripts.load(SCRIPT)


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


def test_a_save_costs_what_stood_still_and_what_ran_slower(benchmark: ModuleType) -> None:
    saved = finished(
        [8.0, 1.1, 1.2, 1.0, 1.2, 1.0],
        [(0.9, 0.6), (0.1, 0.0), (0.3, 0.0)],
        [(0.7, 0.7), (0.2, 0.0), (0.2, 0.0)],
    )
    cost = benchmark.cost_of(saved, BARE, **SIZES)
    assert benchmark.seconds_an_interval(BARE, **SIZES) == pytest.approx(2.0)
    assert cost.iterations_s == pytest.approx(4.4)
    assert cost.slower_a_save_s == pytest.approx(0.2)
    # Save by save, the rank that stood longest: 0.9, 0.2 and 0.3.
    assert cost.later_stood_still_s == pytest.approx(0.25)
    assert cost.later_cost == pytest.approx((0.2 + 0.25) / 2.0)
    assert cost.first_stood_still_s == pytest.approx(0.9)
    assert cost.first_memory_wait_s == pytest.approx(0.7)
    assert cost.one_off_s == pytest.approx(0.65)
    assert cost.before_first_slower_s == pytest.approx(0.1)


def test_the_table_says_what_the_cost_is_a_share_of(benchmark: ModuleType) -> None:
    saved = finished([8.0, *[1.0] * 5], [(0.5, 0.4), (0.02, 0.0), (0.02, 0.0)])
    cost = benchmark.cost_of(saved, BARE, **SIZES)
    text = benchmark.table({"async": cost}, between=2.0, interval=2)
    assert "a save every 2.00 s (2 iterations)" in text
    assert text.splitlines()[-1].split() == [
        "async", "0.020", "0.000", "1.00%", "0.500", "0.400", "0.480", "0.000",
    ]  # fmt: skip


def test_a_save_that_failed_is_no_measure(benchmark: ModuleType) -> None:
    saved = finished([1.0] * 6, [(0.1, 0.0)] * 3)
    saved.report["ranks"][0]["saves"][1]["written_s"] = None
    with pytest.raises(SystemExit, match=r"2\. save"):
        benchmark.cost_of(saved, BARE, **SIZES)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--iterations 8 --interval 3", "--iterations must be at least three times --interval"),
        ("--interval 1", "--interval must be at least 2"),
        ("--kinds async", "--kinds must name none"),
        ("--kinds none", "--kinds must name none, which the others are compared with, and another"),
        ("--kinds sometimes", "invalid choice: 'sometimes'"),
        ("--preset absent.yaml", "--preset absent.yaml is no file; check the path"),
    ],
)
def test_what_measures_nothing_is_refused(
    benchmark: ModuleType, words: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        benchmark.parse(["out", *words.split()])
    assert reason in capsys.readouterr().err


def test_a_file_in_the_place_of_the_results_folder_is_refused(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        benchmark.parse([str(SCRIPT)])
    assert f"{SCRIPT} is a file; name a folder" in capsys.readouterr().err


@pytest.mark.slow
def test_two_kinds_on_the_cpu(tmp_path: Path) -> None:
    tiny = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2"
        " --ffn-hidden-size 64 --seq-length 32 --max-position-embeddings 32 --vocab-size 320"
        " --padded-vocab-size 384 --micro-batch-size 1 --global-batch-size 4 --num-workers 0"
    )
    words = f"--kinds none async --iterations 6 --interval 2 -- {tiny}".split()
    assert "(2 iterations)" in commands.printed(SCRIPT, tmp_path, *words)
    record = json.loads((tmp_path / "async_save.json").read_text())
    assert list(record["runs"]) == ["none", "async"]
    assert record["seconds_between_saves"] > 0
    for rank in record["runs"]["async"]["ranks"]:
        assert [save["iteration"] for save in rank["saves"]] == [2, 4, 6]
    assert not list(tmp_path.glob("saved-*"))
