"""Published runs, predicted from a checkout's profiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.planner_validation.replayed_run import MODELS
from bench.validate_planner import main
from tests.bench.sailor_checkout import write_checkout, write_run

OPT = MODELS["OPT-350"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return write_checkout(tmp_path)


# 8 MiB at 1 GB/s: in the steady state an activation and a gradient a micro-batch.


def test_the_tool_prints_errors_and_writes_figures(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(checkout, "one", stages=[["A"]], seconds=0.8)
    write_run(checkout, "replicas", stages=[["A", "B"]], seconds=3.9)
    file = checkout / "figures.json"
    assert main(["--sailor", str(checkout), "--json", str(file)]) == 0
    assert "mixed, OPT-350M: 2 runs, mean error" in capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert [run["measured_seconds"] for run in figures["runs"]] == [0.8, 3.9]
    assert figures["scores"]["all"]["runs"] == 2
