"""PyTorch's own distributed tests: what passes over gloo passes over two simulated vendors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Compares the name that DDP logs, `hetero`, with that of the backend whose place it takes.
OF_NAMES = {"test_ddp_logging_data_cpu"}
MODULE = "tests.hetero.collectives.torch_suite.run_suite"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_case_fails_that_gloo_passes(tmp_path):
    gloo, hetero = (outcomes(backend, tmp_path) for backend in ("gloo", "hetero"))
    passed = [
        name for name, outcome in gloo.items() if outcome == "passed" and name not in OF_NAMES
    ]
    assert len(passed) > 50
    assert {name: hetero[name] for name in passed} == dict.fromkeys(passed, "passed")


def outcomes(backend: str, folder: Path) -> dict[str, str]:
    results = folder / f"{backend}.json"
    subprocess.run(
        [sys.executable, "-m", MODULE, backend, "--results", str(results)],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "HETERO_INSTEAD_OF"},
        check=True,
        timeout=1700,
    )
    return {name: said["outcome"] for name, said in json.loads(results.read_text()).items()}
