"""Tokens/s over the split of the layers: the runs, what they come to, and three real ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import bench_splits
from bench.bench_splits import parse_options
from bench.reproduction import split_sweep
from bench.reproduction.measurement import Attempt
from bench.reproduction.run_options import parsed
from bench.reproduction.split_sweep import curves, planned_runs
from hetero.errors import HeteroError
from tests.commands import PRESETS
from tests.tools.made_measurements import MEASURED

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

TINY = PRESETS / "tiny.yaml"


def attempt(row: str, tokens: float) -> Attempt:
    return Attempt(row, 1, replace(MEASURED, tokens_per_s=(tokens,)))


def test_every_split_runs_with_every_factor_beside_each_vendor_alone() -> None:
    options = parse_options(["--out", "x"])
    runs = planned_runs(options)
    assert [split[0] for split in options.splits] == [10, 12, 14, 16, 18, 20, 22]
    assert len(runs) == 3 + 7 * 3
    assert len({run.row for run in runs}) == len(runs)
    fast, _, slow = runs[:3]
    assert fast.environ == {"HETERO_VENDOR": "nvidia", "HETERO_SLOWDOWN": ""}
    assert slow.environ == {"HETERO_VENDOR": "amd", "HETERO_SLOWDOWN": "amd=2"}
    assert not parsed(options, slow.flags, nproc=2).hetero_pipeline
    last = runs[-1]
    assert last.environ == {"HETERO_VENDOR": "plan", "HETERO_SLOWDOWN": "amd=2"}
    assert parsed(options, last.flags, nproc=2).hetero_pipeline_layers == [22, 10]


def test_it_is_told_where_a_split_is_slower_than_the_slower_vendor_alone() -> None:
    options = parse_options("--first-layers 10 16 22 --factors 1 2 --out x".split())
    speeds = {"nvidia-alone": 100, "amd-alone-x2": 50}
    speeds |= {"10-22-amd-x1": 70, "16-16-amd-x1": 101, "22-10-amd-x1": 80}
    speeds |= {"10-22-amd-x2": 24, "16-16-amd-x2": 49, "22-10-amd-x2": 60}
    attempts = [attempt(row, tokens) for row, tokens in speeds.items()]
    equal, slowed = curves(options, attempts)
    assert equal.below(equal.alone) == [(10, 22), (22, 10)]
    assert (slowed.alone, slowed.best.split) == (50, (22, 10))
    found = slowed.as_json()
    assert found["below_alone"] == [(10, 22), (16, 16)]
    assert found["below_own_gpus"] == [(10, 22)]
    table = split_sweep.render(options, [equal, slowed]).splitlines()
    assert len({line.count("|") for line in table}) == 1
    assert table[3] == "| 16/16 | **101** (1.01) | 49 (0.98) |"
    notes = "\n".join(split_sweep.notes(options, [equal, slowed], attempts))
    assert "amd x2: below the slower vendor alone, GPU for GPU, with 10/22, 16/16" in notes
    assert "(half of it, calculated), with 10/22" in notes
    assert split_sweep.draw([equal, slowed], title="a title").startswith(b"\x89PNG")


def test_a_vendor_that_is_hardly_slowed_ends_the_sweep_before_its_splits() -> None:
    options = parse_options("--factors 1 1.5 2 --out x".split())
    attempts = [attempt("nvidia-alone", 38.1), attempt("amd-alone-x1.5", 30.0)]
    split_sweep.require_slowed(options, attempts)
    with pytest.raises(HeteroError, match=r"2 times slower .* was 1\.04 times .* larger --micro-b"):
        split_sweep.require_slowed(options, [*attempts, attempt("amd-alone-x2", 36.7)])


def test_curves_are_of_what_has_been_measured() -> None:
    options = parse_options("--first-layers 10 16 --factors 1 2 --out x".split())
    attempts = [attempt("10-22-amd-x1", 70), Attempt("16-16-amd-x1", 1, problem="no memory")]
    (only,) = curves(options, attempts)
    assert [point.split for point in only.points] == [(10, 22)]
    assert only.alone is None
    assert only.as_json()["below_alone"] == []
    notes = split_sweep.notes(options, [only], attempts)
    assert notes[-1] == "16-16-amd-x1: no memory"


@pytest.mark.slow
def test_a_sweep_of_a_tiny_model_on_this_machines_cpu(tmp_path: Path) -> None:
    words = f"--model {TINY} --first-layers 1 --factors 3 --iterations 4 --warmup 1"
    assert bench_splits.main([*words.split(), "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "splits.json").read_text())
    assert record["is_complete"]
    assert [run["row"] for run in record["runs"]] == ["nvidia-alone", "amd-alone-x3", "1-3-amd-x3"]
    # Slower, and nothing else.
    assert len({tuple(run["measurement"]["losses"]) for run in record["runs"]}) == 1
    slowed = "HETERO_SLOWDOWN=amd=3: layers take so many times as long (simulated)"
    assert slowed not in (tmp_path / "nvidia-alone-1.log").read_text()
    assert slowed in (tmp_path / "amd-alone-x3-1.log").read_text()
    (curve,) = record["curves"]
    assert curve["points"][0]["tokens_per_s"] > 0
    assert "vendors simulated" in (tmp_path / "splits.md").read_text().splitlines()[0]
    assert (tmp_path / "splits.png").stat().st_size > 1000
