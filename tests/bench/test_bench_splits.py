"""Tokens/s over the split of the layers: the runs, what they come to, and three real ones."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from bench import bench_splits
from bench.bench_splits import parse_options
from bench.reproduction.measurement import Attempt
from bench.reproduction.run_options import parsed
from bench.reproduction.split_prediction import predictions
from bench.reproduction.split_sweep import (
    SweepOptions,
    all_splits,
    curves,
    notes,
    planned_runs,
    render,
)
from hetero.planner.layer_profile import (
    AcceleratorProfile,
    MeasuredProfile,
    PartCosts,
    PassTimes,
    Point,
)
from hetero.tools.preflight_checks.network import PathResult
from tests.commands import PRESETS
from tests.tools.made_measurements import MEASURED

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


def predicted_from_made_files(folder: Path) -> tuple[SweepOptions, dict[str, float]]:
    """A model of 12 layers of one cost, whose other parts and link cost next to nothing."""
    nothing, layer = PassTimes(1e-9, 1e-9), PassTimes(0.01, 0.02)
    costs = PartCosts(layer=layer, embedding=nothing, head=nothing, layer_activation_bytes=1.0)
    measured = AcceleratorProfile({Point(1, 1, 64): costs}, 1e-15)
    profile = MeasuredProfile({"here-nvidia": measured})
    (folder / "profile.json").write_text(json.dumps(profile.to_mapping()))
    link = PathResult("shm", latency_us=1.0, there_gb_s=1e3, back_gb_s=1e3, both_gb_s=1e3)
    (folder / "link.json").write_text(json.dumps(asdict(link)))
    words = f"--model {TINY} --factors 1 2 --first-layers 6 8 --resume --predict --out {folder}"
    words += " --global-batch-size 64 --micro-batch-size 1"
    options = parse_options(
        [*words.split(), "--", "--num-layers", "12", "--padded-vocab-size", "8064"]
    )
    every = planned_runs(replace(options, splits=all_splits(options)))
    return options, predictions(options, every, nproc=options.nproc)


def test_the_planner_predicts_every_split_from_one_profile(tmp_path: Path) -> None:
    _, tokens = predicted_from_made_files(tmp_path)
    assert len(tokens) == 2 + 2 * 11
    even, slowed = tokens["6-6-amd-x1"], tokens["8-4-amd-x2"]
    # 64 micro-batches, and a pipeline's fill and drain of one.
    assert even == pytest.approx(64 * 64 / (65 * 6 * 0.03), rel=1e-3)
    assert slowed == pytest.approx(64 * 64 / (65 * 8 * 0.03), rel=1e-3)
    assert slowed == max(value for row, value in tokens.items() if row.endswith("amd-x2"))
    assert tokens["nvidia-alone"] == pytest.approx(even, rel=1e-3)
    assert tokens["amd-alone-x2"] == pytest.approx(even / 2, rel=1e-3)
    # Of 11 layers on the slowed vendor, 22 times a layer where it alone takes 12.
    assert tokens["1-11-amd-x2"] < tokens["amd-alone-x2"]


def test_what_was_measured_stands_beside_what_was_predicted(tmp_path: Path) -> None:
    options, tokens = predicted_from_made_files(tmp_path)
    measured = {row: 1.1 * tokens[row] for row in ("nvidia-alone", "6-6-amd-x1", "8-4-amd-x1")}
    attempts = [
        Attempt(row, 1, replace(MEASURED, tokens_per_s=(tokens_per_s,)))
        for row, tokens_per_s in measured.items()
    ]
    (curve,) = curves(options, attempts, tokens)
    assert len(curve.predicted) == 11
    assert curve.errors == pytest.approx([1 / 1.1 - 1] * 3)
    assert f"predicted {tokens['6-6-amd-x1']:,.0f}" in render(options, [curve])
    (said,) = (line for line in notes(options, [curve], attempts) if "off on average" in line)
    assert "of 3 runs 9.1% off on average, 9.1% at most" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs hold the model")
def test_no_model_is_profiled_that_this_machine_cannot_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_splits.main(["--predict", "--out", str(tmp_path)]) == 2
    assert "llama3_8b would fill its memory" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_prediction_needs_the_rows_of_the_embedding(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_splits.main(["--model", str(TINY), "--predict", "--out", "x"]) == 2
    assert "--padded-vocab-size" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_of_a_tiny_model_on_this_machines_cpu(tmp_path: Path) -> None:
    words = f"--model {TINY} --first-layers 1 --factors 3 --iterations 4 --warmup 1 --predict"
    words += f" --out {tmp_path} -- --padded-vocab-size 8064"
    assert bench_splits.main(words.split()) == 0
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
    assert [first for first, _ in curve["predicted"]] == [1, 2, 3]
    assert "vendors simulated" in (tmp_path / "splits.md").read_text().splitlines()[0]
    assert (tmp_path / "splits.png").stat().st_size > 1000
