"""prove_parity: what it compares bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero.tools.prove_parity import HOMOGENEOUS, conclude, parse_options
from hetero.tools.runs import Finished


def finished(losses: list[float], *, weights: str = "ab", speed: float = 100.0) -> Finished:
    figures = {"grad_norm": 1.0, "tokens_per_s": speed, "tflops_per_gpu": 1.0}
    rows = [figures | {"iteration": n, "loss": loss} for n, loss in enumerate(losses, start=1)]
    report = {"weights": {"sha256": weights}, "boundary_bytes": 8, "simulated": True}
    return Finished(rows, report)


def concluded(mixed: Finished, out: Path) -> tuple[bool, dict[str, Any]]:
    runs = {HOMOGENEOUS: finished([3.0, 2.5]), "mixed-gloo": mixed}
    agreed = conclude(runs, flags=["--bf16"], out=out)
    (comparison,) = json.loads((out / "parity.json").read_text())["comparisons"]
    return agreed, comparison


def test_equal_runs_agree_and_their_speeds_are_compared(tmp_path: Path) -> None:
    agreed, comparison = concluded(finished([3.0, 2.5], speed=90.0), tmp_path)
    assert agreed
    assert comparison == {
        "run": "mixed-gloo",
        "losses_identical": True,
        "weights_identical": True,
        "max_abs_loss_difference": 0.0,
        "speed_ratio": 0.9,
    }


@pytest.mark.parametrize(
    ("mixed", "words"),
    [
        (finished([3.0, 2.75]), ["DIFFER", "identical", "0.25"]),
        (finished([3.0, 2.5], weights="ac"), ["identical", "DIFFER", "0"]),
    ],
    ids=["a loss", "the weights"],
)
def test_a_difference_is_said_and_not_passed(
    mixed: Finished, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agreed, _ = concluded(mixed, tmp_path)
    assert not agreed
    said = capsys.readouterr().out
    assert next(line.split()[1:4] for line in said.splitlines() if "mixed-gloo" in line) == words
    assert "simulated" in said


def test_what_stands_behind_the_dashes_is_the_programs() -> None:
    options = parse_options(["--nproc", "4", "--sizes", "2", "2", "--", "--num-layers", "4"])
    assert (options.nproc, options.sizes) == (4, [2, 2])
    assert options.flags == ["--num-layers", "4"]
