"""What the parity benchmark writes: a table to read, and all that is needed to judge it again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.parity_benchmark.judgement import judge
from bench.parity_benchmark.parity_options import Options, parse_options
from bench.parity_benchmark.parity_results import write_results
from bench.parity_benchmark.parity_runs import DETERMINISTIC, FAST, Run
from bench.parity_benchmark.side_by_side import Outcome
from bench.real_text.data_set import RealText
from tests.bench.parity_benchmark.made_outcomes import ITERATIONS, failed, outcome, outcomes

LARGEST_FILE = 16 * 2**20


@pytest.fixture(autouse=True)
def _empty_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a second each, and has tests of its own."""
    draw = "hetero.tools.run_comparison.loss_picture.draw_png"
    monkeypatch.setattr(draw, lambda _, path: path.touch())


@pytest.fixture
def data(tmp_path: Path) -> RealText:
    (tmp_path / "tokens_text_document.bin").write_bytes(np.zeros(1_000_000, np.uint16).tobytes())
    return RealText(tmp_path)


def options(out: Path, *words: str) -> Options:
    out.mkdir(exist_ok=True)
    given = ["--iterations", str(ITERATIONS), "--out", str(out), *words]
    return parse_options(given, description="")


def written(out: Path, data: RealText, made: dict[Run, Outcome], *words: str) -> str:
    judgements = [judge(kernels, made) for kernels in dict.fromkeys(run.kernels for run in made)]
    return write_results(options(out, *words), data, made, judgements, ["the command"])


def line_of(text: str, run: Run) -> str:
    again = ", again" if run.is_again else ""
    start = f"| {run.kernels} | {run.transport} | {run.seed}{again} |"
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line


def test_the_table_has_a_line_for_every_run(tmp_path: Path, data: RealText) -> None:
    made = outcomes(tmp_path, DETERMINISTIC) | outcomes(tmp_path, FAST)
    text = written(tmp_path / "out", data, made)
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    for run in made:
        line = line_of(text, run)
        if not run.is_homogeneous:
            assert line.endswith("| pass |")
        elif run.is_again:
            assert line.endswith("| not judged |")
        else:
            assert line.endswith("| reference |" if run.is_reference else "| seed |")
    direct = line_of(text, Run(DETERMINISTIC, "device-direct", 1))
    assert "losses identical, weights identical" in direct
    assert "envelope 1" in line_of(text, Run(FAST, "device-direct", 1))
    assert "vendors simulated" in text.splitlines()[0]
    assert "40 iterations of 32 x 1024 tokens on NVIDIA H200" in text.splitlines()[0]
    assert "1,000,000 tokens; a run sees 1,310,720, 1.31 epochs" in text


def test_what_fails_is_told_by_name(tmp_path: Path, data: RealText) -> None:
    made = outcomes(tmp_path, DETERMINISTIC) | outcomes(tmp_path, FAST)
    changes = [
        (Run(DETERMINISTIC, "device-direct", 1), {"weights": "other"}),
        (Run(DETERMINISTIC, "cpu-forward", 1), {"factor": 1 + 2**-50}),
        (Run(FAST, "device-direct", 1), {"factor": 1.05}),
    ]
    for run, change in changes:
        made[run] = outcome(tmp_path, run, **change)  # type: ignore[arg-type]
    broken = Run(FAST, "cpu-forward", 1)
    made[broken].launch.log.write_text("many lines\nerror: no memory\n")
    made[broken] = failed(made[broken], "failed with exit code 1: no memory")
    text = written(tmp_path / "out", data, made)
    direct, forward, ends_elsewhere = (line_of(text, run) for run, _ in changes)
    assert direct.endswith("| losses identical, weights DIFFER | FAIL |")
    assert forward.endswith("| 35 losses DIFFER, weights identical | FAIL |")
    assert "**final-relative 0.05**" in ends_elsewhere
    assert line_of(text, broken).endswith("| - | - | - | no result |")
    assert "- fast, cpu-forward, seed 1: failed with exit code 1: no memory" in text
    log = (tmp_path / "out" / "failed_runs.log").read_text()
    assert "many lines" in log
    assert json.loads((tmp_path / "out" / "parity_training.json").read_text())["passed"] is False


def test_a_bound_that_decides_nothing_is_in_brackets_and_said(
    tmp_path: Path, data: RealText
) -> None:
    made = outcomes(tmp_path, FAST)
    again = Run(FAST, "homogeneous", 1, is_again=True)
    made[again] = outcome(tmp_path, again, factor=1.02)
    text = written(tmp_path / "out", data, made)
    assert "(final-relative 0.02)" in line_of(text, again)
    assert "(final-relative 0)" in line_of(text, Run(FAST, "device-direct", 1))
    assert "final-relative decides nothing here" in text
    assert "ends 0.02 from it, and the bound is 0.007" in text


def test_the_files_are_few_and_small_and_hold_every_loss(tmp_path: Path, data: RealText) -> None:
    made = outcomes(tmp_path, DETERMINISTIC) | outcomes(tmp_path, FAST)
    out = tmp_path / "out"
    text = written(out, data, made)
    assert sorted(path.name.removeprefix("parity_training") for path in out.iterdir()) == [
        *(".json", ".md", "_deterministic.png", "_fast.png")
    ]
    assert all(path.stat().st_size < LARGEST_FILE for path in out.iterdir())
    assert (out / "parity_training.md").read_text() == text
    record = json.loads((out / "parity_training.json").read_text())
    assert record["passed"] is True
    assert set(record["judgements"]) == {DETERMINISTIC, FAST}
    assert [run["run"] for run in record["runs"]] == [run.name for run in made]
    for run, outcome_ in zip(record["runs"], made.values(), strict=True):
        assert run["loss"] == [row["loss"] for row in outcome_.finished.iterations]
        assert (run["gpus"], run["weights_sha256"], run["seconds"]) == ("0,1", "same", 12.3)
    assert str(tmp_path) not in (out / "parity_training.json").read_text()


def test_files_of_an_earlier_call_do_not_stay(tmp_path: Path, data: RealText) -> None:
    out = tmp_path / "out"
    good = outcomes(tmp_path, DETERMINISTIC)
    broken = {run: failed(was, "broke") for run, was in good.items()}
    written(out, data, good)
    text = written(out, data, broken)
    assert sorted(path.name for path in out.iterdir()) == [
        *("failed_runs.log", "parity_training.json", "parity_training.md")
    ]
    assert "nothing can be compared" in text
    written(out, data, good)
    assert not (out / "failed_runs.log").exists()


def test_a_loss_that_is_no_number_is_shown_and_fails(tmp_path: Path, data: RealText) -> None:
    good = outcomes(tmp_path, FAST)
    run = Run(FAST, "device-direct", 1)
    good[run] = outcome(tmp_path, run, broken_from=30)
    line = line_of(written(tmp_path / "out", data, good), run)
    assert "| nan |" in line
    assert "**finite" in line
    assert line.endswith("| FAIL |")


def test_a_text_seen_too_often_and_another_model_are_said(tmp_path: Path, data: RealText) -> None:
    good = outcomes(tmp_path, DETERMINISTIC)
    other = "-- --num-layers 4 --seq-length 4096 --max-position-embeddings 4096"
    text = written(tmp_path / "out", data, good, *other.split())
    assert text.startswith("a model changed from llama_113m, 40 iterations of 32 x 4096 tokens")
    assert "the text is too small: it was seen more than 3 times" in text
