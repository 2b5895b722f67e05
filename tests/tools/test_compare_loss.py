"""What `tools/compare_loss.py` promises, seen from outside."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hetero.tools.compare_loss import main
from hetero.tools.run_comparison.curves import Curve
from tests import commands
from tests.tools.run_comparison.simulated_runs import Fault, simulated_run, with_loss

TOOL = commands.ROOT / "tools" / "compare_loss.py"

NUMBERS = ("loss", "grad_norm", "learning_rate", "weight_decay", "batch_size", "consumed_tokens")


def metrics_file(path: Path, curve: Curve) -> str:
    rows = []
    for position, iteration in enumerate(curve.iteration.tolist()):
        numbers = {name: float(getattr(curve, name)[position]) for name in NUMBERS}
        finite = {name: value if np.isfinite(value) else None for name, value in numbers.items()}
        skipped = bool(curve.skipped[position])
        rows.append({"iteration": iteration, **finite, "skipped": skipped})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("metrics")
    runs = {f"seed{seed}": simulated_run(seed, iterations=300) for seed in (1, 2, 3)}
    runs["again"] = runs["seed1"]
    runs["right"] = simulated_run(1, iterations=300, rounding=1e-3)
    runs["wrong"] = simulated_run(1, iterations=300, fault=Fault(rate=1.1))
    runs["short"] = runs["right"].at(np.arange(200))
    runs["diverged"] = with_loss(runs["right"], 250, np.nan)
    return {name: metrics_file(folder / f"{name}.jsonl", run) for name, run in runs.items()}


@pytest.fixture
def run(files, tmp_path, capsys, monkeypatch):
    """Runs the tool on the files that words name; gives exit code, stdout and stderr.

    Without pictures, which take a second each, and have tests of their own.
    """
    monkeypatch.setattr("hetero.tools.run_comparison.picture.draw_png", lambda *_: None)
    monkeypatch.setattr("hetero.tools.run_comparison.picture.render_page", lambda _: "")

    def call(command: str) -> tuple[int, str, str]:
        words = [files.get(word, word) for word in command.split()]
        code = main([*words, "--out", str(tmp_path / "out")])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_a_right_run_passes_with_exit_code_0(files, tmp_path):
    seeds = ("--seeds", files["seed2"], files["seed3"])
    ended = commands.ended(TOOL, files["seed1"], files["right"], *seeds, "--out", tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[-1] == "pass"
    assert json.loads((tmp_path / "compare_loss.json").read_text())["passed"] is True


def test_a_wrong_run_fails_with_exit_code_1_and_the_results_are_written(run, files, tmp_path):
    code, out, err = run("seed1 right wrong --seeds seed2 seed3")
    assert (code, err) == (1, "")
    assert out.splitlines()[-1] == f"FAIL: {files['wrong']}"
    record = json.loads((tmp_path / "out" / "compare_loss.json").read_text())
    assert [candidate["passed"] for candidate in record["candidates"]] == [True, False]
    code, out, _ = run("seed1 diverged")
    assert code == 1
    assert "the loss of iteration 251 is NaN, infinite or missing" in out


def test_a_pass_that_shows_less_than_it_seems_says_so(run):
    code, out, _ = run("seed1 seed1 --identical")
    assert code == 0
    assert "THE SAME FILE" in out
    assert "THE SAME FILE" not in run("seed1 again --identical")[1]
    code, out, _ = run("seed1 right")
    assert code == 0
    assert "NO ENVELOPE" in out
    assert out.splitlines()[-1] == "pass, without envelope, grad-norm-envelope"


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("seed1 again --identical", 0, "pass"),
        ("seed1 right --identical", 1, "iterations that differ"),
        ("seed1 right --criteria final-relative=1e-9", 1, "final-relative"),
        ("seed1 wrong --criteria grad-norm-envelope=0.5 --seeds seed2 seed3", 0, "pass"),
        ("seed1 wrong --criteria first-steps --first 2", 0, "pass"),
        ("seed1 wrong --criteria first-steps --first 100", 1, "FAIL"),
    ],
)
def test_named_criteria_replace_the_default_ones(run, command, code, says):
    found, out, _ = run(command)
    assert found == code
    assert says in out
    assert "schedule" not in out


def test_the_range_can_be_chosen(run):
    code, out, _ = run("seed1 short --to-iteration 200 --from-iteration 101 --smooth 50")
    assert code == 0
    assert "over 100 iterations (101 to 200), smoothed over 50" in out


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("seed1 short", "give --to-iteration 200 to compare what both have"),
        ("seed1 right --seeds seed2", "needs 3 homogeneous runs that"),
        ("seed1 right --criteria grad-norm-envelope --seeds seed2", "--seed, and has 2; give"),
        ("seed1 right --criteria envelope", "--seed, and has 1; give"),
        ("seed1 right --criteria final-relative final-relative=1", "names final-relative twice"),
        ("seed1 right --criteria final-relative --identical", "give one of the two"),
        ("seed1 right --same-seed --other-seed", "not allowed with argument"),
        ("seed1 right --smooth 0", "must be a whole number of at least 1, not '0'"),
        ("seed1 right --smooth 301", "--smooth 301 is more than the 300 iterations"),
        ("seed1", "the following arguments are required: candidate"),
        ("seed1 right --out {tool}", "is a file; name a folder"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2_and_nothing_is_written(
    files, tmp_path, refused, command, says
):
    words = [files.get(word, word) for word in command.format(tool=TOOL).split()]
    assert says in refused(main, ["--out", tmp_path / "out", *words])
    assert not (tmp_path / "out").exists()


def test_every_file_and_criterion_that_makes_no_sense_is_told_at_once(files, tmp_path, refused):
    words = f"seed1 absent --seeds {tmp_path} {TOOL} --criteria smoothly identical=1".split()
    words += ["--out", str(TOOL)]
    said = refused(main, [files.get(word, word) for word in words], several=True).splitlines()
    expected = (
        "error: 6 errors:",
        "--out",
        "there is no 'smoothly'",
        "identical takes no bound",
        f"{tmp_path} cannot be read (Is a directory)",
        "line 1, is not JSON",
        "absent cannot be read (No such file",
    )
    for one, line in zip(expected, said, strict=True):
        assert one in line


def test_a_python_without_numpy_is_told_which_environment_to_take() -> None:
    done = commands.ended("-S", TOOL, "a.jsonl", "b.jsonl", PYTHONPATH="")
    assert done.returncode == 2
    assert done.stderr.startswith("error: numpy is not installed for ")
