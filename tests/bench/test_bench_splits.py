"""Tokens/s over the split of the layers: the runs, what they come to, and three real ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import bench_splits
from bench.bench_splits import parse_options
from bench.reproduction.run_options import parsed
from bench.reproduction.split_sweep import planned_runs
from tests.commands import PRESETS

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

TINY = PRESETS / "tiny.yaml"


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
