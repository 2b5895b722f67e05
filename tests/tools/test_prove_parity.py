"""prove_parity: what it compares bit for bit, and how it is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import prove_parity
from tools.prove_parity import HOMOGENEOUS, conclude, parse_options
from tools.runs import Finished

pytestmark = pytest.mark.usefixtures("preloaded_ranks")


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


MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
    " --max-position-embeddings 32 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data"
    " --tokenizer-type ByteLevelTokenizer"
)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "error: "),
        ("--nproc 2", "error: "),
        ("--nproc 2 --", "error: "),
        ("--nproc x", "--nproc"),
        ("--nproc 0 -- --num-layers 4", "--nproc"),
        (f"--out {__file__}/x -- {MODEL}", f"--out {__file__}/x cannot be made"),
        (f"-- {MODEL} --no-such-flag", "--no-such-flag"),
        (f"-- {MODEL} --train-iters many", "--train-iters"),
        # Else it would compare a mixed run with a mixed one, and call them identical.
        (
            f"-- {MODEL} --hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1",
            "would make the homogeneous run a mixed one",
        ),
        (
            f"--nproc 4 -- {MODEL} --global-batch-size 2 --hetero-data-parallel amd:1,nvidia:1",
            "would make the homogeneous run a mixed one",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    words: str, reason: str, tmp_path: Path, refused, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert reason in refused(prove_parity.main, words)
    assert list(tmp_path.iterdir()) == []
