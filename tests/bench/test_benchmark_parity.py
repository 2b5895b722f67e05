"""The parity benchmark: its runs on GPUs, and a tiny model on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.parity_benchmark.parity_options import Options, parse_options
from tests.commands import ROOT

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

SCRIPT = ROOT / "bench" / "benchmark_parity.py"
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2"
    " --ffn-hidden-size 64 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1"
    " --global-batch-size 4 --num-workers 0"
)


def options(words: str) -> Options:
    return parse_options(words.split(), description="")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("two_gpus")
def test_llama_8b_runs_alone_on_its_gpus_with_deterministic_kernels() -> None:
    chosen = options("--model llama3_8b --out x")
    assert [run.name for run in chosen.runs] == [
        "deterministic, homogeneous, seed 1",
        "deterministic, device-direct, seed 1",
    ]
    assert (chosen.per_pair, chosen.iterations, chosen.tokens) == (1, 50, 50 * 8 * 4096)


def benchmark(out: Path, words: str) -> subprocess.CompletedProcess[str]:
    """The benchmark with a tiny model, on the CPU."""
    return subprocess.run(
        [sys.executable, SCRIPT, "--out", out, "--iterations", "6", *f"{words} -- {TINY}".split()],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
def test_the_command_trains_and_compares_and_goes_on_without_a_run_that_fails(
    tmp_path: Path,
) -> None:
    """On CPU device-direct cannot be: the benchmark fails for it, and judges the other."""
    outcome = benchmark(
        tmp_path / "out",
        "--kernels deterministic --transports device-direct gloo --per-pair 2",
    )
    assert outcome.returncode == 1, outcome.stderr
    lines = outcome.stdout.splitlines()
    assert lines[-1] == "FAIL: deterministic"
    (gloo,) = [line for line in lines if line.startswith("| deterministic | gloo")]
    assert gloo.endswith("| losses identical, weights identical | pass |")
    record = json.loads((tmp_path / "out" / "parity_training.json").read_text())
    homogeneous, direct, gloo_run = record["runs"]
    assert homogeneous["loss"] == gloo_run["loss"]
    assert len(gloo_run["loss"]) == 6
    assert homogeneous["weights_sha256"] == gloo_run["weights_sha256"]
    assert "ipc: it joins GPUs" in direct["problem"]
    assert "ipc: it joins GPUs" in (tmp_path / "out" / "failed_runs.log").read_text()
