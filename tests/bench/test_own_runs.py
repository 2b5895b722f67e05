"""Plans of our own, predicted and run: what is asked of them, and what the comparison says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.planner_validation import own_report
from bench.planner_validation.measured_run import MeasuredRun
from bench.planner_validation.own_bench import OwnBench
from bench.planner_validation.own_cases import FACTORS, ON_CPU, Case, cases
from hetero.planner.layer_profile import (
    AcceleratorProfile,
    MeasuredProfile,
    PartCosts,
    PassTimes,
    Point,
)

PLANNED = {
    1.5: Case(name="planned x1.5", factor=1.5, layers=(5, 3)),
    2.0: Case(name="planned x2", factor=2.0, layers=(6, 2)),
}


def profile() -> MeasuredProfile:
    def measured(factor: float) -> AcceleratorProfile:
        def costs(size: int, recompute: str) -> PartCosts:
            layer = PassTimes(0.01 * factor * size, 0.02 * factor * size)
            return PartCosts(layer=layer, embedding=layer, head=layer, layer_activation_bytes=1e6)

        points = {
            Point(1, size, ON_CPU.model["seq-length"], recompute): costs(size, recompute)
            for size in (1, 2)
            for recompute in ("none", "full")
        }
        return AcceleratorProfile(points, 1e-9)

    names = {f"here-amd-x{factor:g}": factor for factor in FACTORS} | {"here-nvidia-x1": 1.0}
    return MeasuredProfile({name: measured(factor) for name, factor in names.items()})


PROFILE = profile()


class FakeBench(OwnBench):
    """A bench whose runs take as long as a function of the prediction says."""

    profile = PROFILE
    link = {"rail_gbits": 10.0, "rail_latency_us": 10.0}  # noqa: RUF012
    base_bytes = 5e8
    cases = cases(ON_CPU, PLANNED)
    slower = 1.0
    runs = 0

    def measure(self, case: Case) -> MeasuredRun:
        FakeBench.runs += 1
        (predicted,) = self.predict(case)
        seconds = predicted.seconds * self.slower
        return MeasuredRun(
            [9.0, 9.0, seconds, seconds], [use.peak_bytes for use in predicted.stages]
        )


@pytest.fixture
def fake_bench(monkeypatch: pytest.MonkeyPatch) -> type[FakeBench]:
    monkeypatch.setattr(own_report, "OwnBench", FakeBench)
    monkeypatch.setattr(FakeBench, "runs", 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return FakeBench


def test_runs_as_predicted_meet_every_target(fake_bench: type[FakeBench], tmp_path: Path) -> None:
    figures = tmp_path / "own.json"
    text = own_report.own_runs(tmp_path / "own", seconds=60, figures=figures)
    assert "missed" not in text
    assert text.count("met") == 5
    assert "beats the even split" in text
    raw = json.loads(figures.read_text())
    assert len(raw["runs"]) == fake_bench.runs == len(FakeBench.cases)
    assert "simulated" in raw
    again = own_report.own_runs(tmp_path / "own", seconds=60, figures=figures)
    assert (again, fake_bench.runs) == (text, len(FakeBench.cases))
