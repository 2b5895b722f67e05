"""docs/benchmarks/time_timers.py: what it counts as the cost of timers, and what it refuses."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests import scripts
from tools.runs import ROOT

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

SCRIPT = ROOT / "docs" / "benchmarks" / "time_timers.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return scripts.load(SCRIPT)


def test_a_step_lasts_from_end_to_end_with_what_lies_between(benchmark: ModuleType) -> None:
    ends = {1: 9.0, 2: 10.0, 3: 10.5, 4: 11.2, 5: 11.5}
    assert benchmark.step_milliseconds(ends, warmup=2) == pytest.approx(500)


def test_a_cost_is_the_ratio_of_two_runs_of_one_repeat(benchmark: ModuleType) -> None:
    def repeat(base: float, timed: float) -> list[object]:
        return [
            benchmark.Run(level=2, step_ms=timed, losses=[]),
            benchmark.Run(level=0, step_ms=base, losses=[]),
        ]

    (cost,) = benchmark.costs([repeat(100, 101), repeat(200, 200), repeat(100, 104)], base=0)
    assert (cost.level, cost.median, cost.least, cost.most) == pytest.approx((2, 0.01, 0, 0.04))


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--levels 2 2", "--levels must name two or more"),
        ("--warmup 0", "--warmup must be at least 1"),
        ("--warmup 30", "less than --iterations"),
        ("--repeats 0", "--repeats must be at least 1"),
    ],
)
def test_what_measures_nothing_is_refused(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str], words: str, remedy: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        benchmark.parse(["out", *words.split()])
    assert remedy in capsys.readouterr().err
