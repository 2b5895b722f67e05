"""Meshes of unequal shape beside homogeneous runs: the runs, what they come to, and real ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import bench_meshes
from bench.bench_meshes import parse_options
from bench.reproduction.measurement import Attempt
from bench.reproduction.mesh_runs import findings, planned_runs, render
from bench.reproduction.run_options import parsed, possible_here
from tests.commands import PRESETS
from tests.tools.made_measurements import MEASURED

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

TINY = PRESETS / "tiny.yaml"
ON_EIGHT = "--meshes TP4xDP1/TP2xDP2 TP1xDP4/TP2xDP2 --out x"


def test_each_shape_runs_alone_on_as_many_gpus_with_the_steps_of_its_pair() -> None:
    options = parse_options([*ON_EIGHT.split(), "--transports", "device-direct", "cpu-forward"])
    runs = {run.row: run for run in planned_runs(options)}
    alone = [name for name in runs if "micro-batch" in name]
    assert alone == [
        *("TP4xDP1-micro-batch-2", "TP2xDP2-micro-batch-1"),
        *("TP1xDP4-micro-batch-1", "TP2xDP2-micro-batch-2"),
    ]
    for name, run in runs.items():
        args = parsed(options, run.flags, nproc=run.nproc)
        assert run.nproc == 8
        assert args.pipeline_model_parallel_size == 2
        if name in alone:
            assert not run.environ
            steps = 2 if name in alone[:2] else 4
            assert args.micro_batch_size * args.data_parallel_size == steps
        else:
            assert run.environ == {"HETERO_VENDOR": "plan"}
            assert args.hetero_tensor_sizes in ([4, 2], [1, 2])
    assert [name for name in runs if name not in alone] == [
        f"{meshes}-{transport}"
        for meshes in ("TP4xDP1-TP2xDP2", "TP1xDP4-TP2xDP2")
        for transport in ("device-direct", "cpu-forward")
    ]


def test_without_a_gpu_no_run_asks_for_device_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = f"--meshes TP2xDP1/TP1xDP2 --global-batch-size 8 --model {TINY} --out x"
    options = parse_options(words.split())
    assert options.transports == ("cpu-forward",)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert possible_here(["device-direct", "gloo"]) == ["device-direct", "gloo"]


def test_what_no_mesh_of_a_pair_could_run_is_told_of_both(refused) -> None:
    told = refused(bench_meshes.main, "--meshes TP3xDP1/TP1xDP1 --out x", several=True)
    assert "--tensor-model-parallel-size 3" in told


def test_throughput_bytes_and_losses_stand_beside_the_homogeneous_runs() -> None:
    words = "--meshes TP2xDP1/TP1xDP2 --transports shm --global-batch-size 8 --seq-length 1024"
    options = parse_options([*words.split(), "--out", "x"])
    # Four iterations of 8 x 1024 x 4096 elements of bf16, there and back.
    tensors = 4 * 2 * 2 * 8 * 1024 * 4096
    attempts = [
        Attempt("TP2xDP1-micro-batch-2", 1, replace(MEASURED, tokens_per_s=(360.0,))),
        Attempt("TP1xDP2-micro-batch-1", 1, replace(MEASURED, tokens_per_s=(400.0,))),
    ]
    assert findings(options, attempts) == []
    mixed = replace(
        MEASURED, tokens_per_s=(361.0,), losses=(9.0, 8.0, 7.007, 6.0), boundary_bytes=tensors
    )
    (one,) = findings(options, [*attempts, Attempt("TP2xDP1-TP1xDP2-shm", 1, mixed)])
    assert one.references_per_gpu == (90.0, 100.0)
    assert one.predicted == 380.0
    assert one.of_predicted == pytest.approx(0.95)
    assert not one.as_json()["is_reached"]
    assert one.of_slower == pytest.approx(361 / 360)
    assert one.boundary_bytes == one.expected_bytes
    assert one.losses_apart == pytest.approx((0.001, 0.001))
    assert one.references_apart == 0.0
    assert "| 0.950, below 0.97 | 1.003 |" in render([one])


@pytest.mark.slow
def test_meshes_of_a_tiny_model_on_this_machines_cpu(tmp_path: Path) -> None:
    words = f"--model {TINY} --meshes TP2xDP1/TP1xDP1 --transports shm --iterations 2 --warmup 1"
    assert bench_meshes.main([*words.split(), "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "meshes.json").read_text())
    assert record["is_complete"]
    (one,) = record["findings"]
    assert one["gpus"] == 3
    assert one["boundary_bytes"] == one["expected_bytes"] > 0
    assert max(*one["losses_apart"], one["references_apart"]) < 1e-5
    assert one["of_predicted"] > 0
    assert "vendors simulated" in (tmp_path / "meshes.md").read_text().splitlines()[0]
