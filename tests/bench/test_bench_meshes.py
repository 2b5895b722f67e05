"""Meshes of unequal shape beside homogeneous runs: the runs, what they come to, and real ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import bench_meshes
from bench.bench_meshes import parse_options
from bench.reproduction.mesh_runs import planned_runs
from bench.reproduction.run_options import parsed
from tests.commands import PRESETS

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


@pytest.mark.parametrize(
    ("meshes", "more", "sizes", "reference"),
    [
        (
            "DP4xEP4/ep2xdp4",
            "--num-experts 8",
            {"hetero_data_sizes": [4, 4], "hetero_expert_sizes": [4, 2]},
            {"data_parallel_size": 4, "expert_model_parallel_size": 4},
        ),
        (
            "CP4/CP2xDP2",
            "",
            {"hetero_data_sizes": [1, 2], "hetero_context_sizes": [4, 2]},
            {"data_parallel_size": 1, "context_parallel_size": 4, "micro_batch_size": 2},
        ),
    ],
)
def test_meshes_may_share_sequences_and_experts(
    meshes: str, more: str, sizes: dict[str, list[int]], reference: dict[str, int]
) -> None:
    words = f"--model {TINY} --meshes {meshes} --micro-batch-size 1 --transports shm --out x"
    options = parse_options([*words.split(), "--", *more.split()])
    first, _, mixed = planned_runs(options)
    for run, expected in ((first, reference), (mixed, sizes)):
        args = parsed(options, run.flags, nproc=run.nproc)
        assert run.nproc == 8
        assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize("meshes", ["TP2", "TP2/DP0", "TP2/XP2", "DP2/DP2/DP2", "TP/DP2", "/"])
def test_what_is_no_two_meshes_is_refused(meshes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(["--meshes", meshes, "--out", "x"])
    assert f"{meshes!r} is no two meshes" in capsys.readouterr().err


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
