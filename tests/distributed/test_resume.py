"""Flags of resuming used together, in a mixed pipeline of two processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.tools.runs import SIMULATED
from tests.distributed.harness import MIXED, TINY_LLAMA, Training, launch, read_rows, train

ANOTHER_SCHEDULE = "--lr 1e-4 --min-lr 1e-5 --lr-decay-style linear --lr-warmup-iters 2".split()
CHECKPOINT_SCHEDULE = "--use-checkpoint-opt_param-scheduler"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1".split()


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Training]:
    """A run of four steps with its checkpoint of the second."""
    folder = tmp_path_factory.mktemp("saved")
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--lr-warmup-init", "1e-4"]
    saving = ["--save", str(folder / "checkpoints"), "--save-interval", "2"]
    return folder, train([*flags, *saving], 2, folder, environ=SIMULATED)


def resume(saved: tuple[Path, Training], corpus, folder: Path, *words: str) -> Training:
    """From another folder than that of --save, at the checkpoint's second step."""
    given = ["--load", str(saved[0] / "checkpoints"), "--ckpt-step", "2", *words]
    return train([*TINY_LLAMA, *corpus.flags, *MIXED, *given], 2, folder, environ=SIMULATED)


def rates(folder: Path) -> list[float]:
    return [row["learning_rate"] for row in read_rows(folder / "metrics.jsonl")]


@pytest.mark.parametrize(
    "words",
    [
        [*ANOTHER_SCHEDULE, CHECKPOINT_SCHEDULE],
        [*ANOTHER_SCHEDULE, CHECKPOINT_SCHEDULE, "--no-load-rng", "--use-checkpoint-args"],
        ["--lr-warmup-init", "1e-4", "--no-load-rng"],
    ],
    ids=" ".join,
)
def test_a_run_that_loads_its_optimizer_and_schedule_goes_on_with_the_same_bits(
    saved, corpus, tmp_path: Path, words: list[str]
) -> None:
    resumed = resume(saved, corpus, tmp_path, *words)
    assert resumed.numbers() == saved[1].numbers(since=2)
    assert rates(tmp_path) == rates(saved[0])[2:]


def test_the_schedule_that_is_asked_for_goes_on_without_the_optimizer(
    saved, corpus, tmp_path: Path
) -> None:
    words = [*ANOTHER_SCHEDULE, CHECKPOINT_SCHEDULE, "--no-load-optim"]
    resumed = resume(saved, corpus, tmp_path, *words, "--save", str(tmp_path / "next"))
    assert rates(tmp_path) == rates(saved[0])[2:]
    assert resumed.losses[0] == saved[1].losses[2], "of the same weights and samples"
    assert resumed.losses[1] != saved[1].losses[3], "of other moments"
    (line,) = [line for line in resumed.stdout.splitlines() if "from the checkpoint: " in line]
    assert "schedule (cosine from 0.003 to 0.0003), place in the schedule" in line
    assert "anew: optimizer state" in line
    # What this run saves goes on with that schedule, not with the flags that were typed.
    words = [*ANOTHER_SCHEDULE, CHECKPOINT_SCHEDULE, "--train-iters", "6"]
    words += ["--load", str(tmp_path / "next"), "--ckpt-step", "4"]
    resume(saved, corpus, tmp_path / "on", *words)
    assert rates(tmp_path / "on") == [pytest.approx(3e-4)] * 2


def test_without_the_optimizer_alone_the_schedule_begins_anew_and_a_line_says_so(
    saved, corpus, tmp_path: Path
) -> None:
    resumed = resume(saved, corpus, tmp_path, "--no-load-optim", "--lr-warmup-init", "1e-4")
    assert rates(tmp_path) == rates(saved[0])[:2]
    assert [row["consumed_samples"] for row in read_rows(tmp_path / "metrics.jsonl")] == [12, 16]
    assert "the schedule begins anew and training at iteration 2 of 4" in resumed.stdout
    assert CHECKPOINT_SCHEDULE in resumed.stdout


def test_a_schedule_that_overrides_goes_on_at_the_place_of_the_checkpoint(
    saved, corpus, tmp_path: Path
) -> None:
    words = ["--override-opt_param-scheduler", *ANOTHER_SCHEDULE]
    resumed = resume(saved, corpus, tmp_path, *words)
    straight = tmp_path / "straight"
    train([*TINY_LLAMA, *corpus.flags, *MIXED, *ANOTHER_SCHEDULE], 2, straight, environ=SIMULATED)
    assert rates(tmp_path) == rates(straight)[2:]
    assert resumed.losses[0] == saved[1].losses[2]


def test_a_run_from_the_weights_begins_with_samples_and_schedule_of_its_own(
    saved, corpus, tmp_path: Path
) -> None:
    words = ["--finetune", "--no-load-optim", "--no-load-rng", *ANOTHER_SCHEDULE]
    resumed = resume(saved, corpus, tmp_path, *words)
    assert [row["iteration"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert "anew: iteration and place in the data, optimizer state" in resumed.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--finetune", CHECKPOINT_SCHEDULE], "--finetune begins a new run with a schedule of"),
        (ANOTHER_SCHEDULE, "has another schedule: --lr-warmup-init is 0.0001 there and 0.0 here"),
    ],
)
def test_what_has_no_meaning_is_refused_before_anything_is_written(
    saved, corpus, tmp_path: Path, words: list[str], said: str
) -> None:
    flags = ["--load", str(saved[0] / "checkpoints"), "--save", str(tmp_path / "new"), *words]
    flags += ["--metrics-file", str(tmp_path / "metrics.jsonl")]
    outcomes = launch([*TINY_LLAMA, *corpus.flags, *MIXED, *flags], 2, environ=SIMULATED)
    assert {outcome.code for outcome in outcomes} == {2}
    assert any(said in outcome.stderr for outcome in outcomes)
    assert list(tmp_path.iterdir()) == []
