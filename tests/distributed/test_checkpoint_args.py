"""Runs across two (simulated) vendors that take their model from a checkpoint, or are refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.harness import TINY_LLAMA, Training, launch, train
from tools.runs import SIMULATED

MODEL = (
    "--apply-layernorm-1p --rotary-seq-len-interpolation-factor 4 --apply-query-key-layer-scaling "
    "--norm-epsilon 1e-3 --hidden-dropout 0.2 --attention-dropout 0.2"
).split()
# Nothing of the model, of its tokenizer or of the length of its samples.
RUN = (
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 3e-3 --min-lr 3e-4 "
    "--lr-decay-style cosine --lr-warmup-iters 1 --weight-decay 0.1 --clip-grad 1.0 "
    "--log-interval 1 --eval-iters 0 --num-workers 0 "
    "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1"
).split()


@dataclass(frozen=True)
class Saved:
    """A run that never stopped, and what a run needs that goes on from its half."""

    straight: Training
    data: list[str]
    resume: list[str]


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    saving = ["--save", str(folder / "checkpoints"), "--save-interval", "2"]
    straight = train(
        [*TINY_LLAMA, *MODEL, *corpus.flags, *RUN, *saving], 2, folder / "run", environ=SIMULATED
    )
    return Saved(
        straight=straight,
        data=corpus.flags[corpus.flags.index("--data-path") :],
        resume=["--load", str(folder / "checkpoints"), "--ckpt-step", "2"],
    )


def test_a_run_that_types_nothing_of_the_model_goes_on_with_the_same_losses(
    saved: Saved, tmp_path: Path
) -> None:
    flags = [*RUN, *saved.data, *saved.resume, "--use-checkpoint-args"]
    resumed = train(flags, 2, tmp_path, environ=SIMULATED)
    assert resumed.losses == saved.straight.losses[2:]
    assert resumed.weights == saved.straight.weights
    (taken,) = [line for line in resumed.stdout.splitlines() if line.startswith("taken from ")]
    for flag in (*MODEL[:4], "--norm-epsilon 0.001", "--hidden-dropout 0.2", "--num-layers 4"):
        assert flag in taken


def test_a_run_without_flags_of_the_model_is_refused_by_all_of_them(
    saved: Saved, corpus, tmp_path: Path
) -> None:
    flags = [*TINY_LLAMA, *corpus.flags, *RUN, *saved.resume, "--attention-dropout", "0.2"]
    outcomes = launch(flags, 2, environ=SIMULATED)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    said = outcomes[0].stdout + outcomes[0].stderr
    for words in (
        "--apply-layernorm-1p is on there and off here by default",
        "--rotary-seq-len-interpolation-factor is 4 there and not given here by default",
        "--apply-query-key-layer-scaling is on there and off here by default",
        "--norm-epsilon is 0.001 there and 1e-05 here by default",
        f"start with {MODEL[0]}",
    ):
        assert words in said
    # Typed by TINY_LLAMA, so it is this run's own wish.
    assert "--hidden-dropout is" not in said


def test_a_word_that_contradicts_the_checkpoint_is_refused(saved: Saved) -> None:
    typed = ["--hidden-size", "64", "--norm-epsilon", "1e-5"]
    flags = [*RUN, *saved.data, *saved.resume, "--use-checkpoint-args", *typed]
    outcomes = launch(flags, 2, environ=SIMULATED)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    said = outcomes[0].stdout + outcomes[0].stderr
    assert "--hidden-size is 32 there and 64 here, --norm-epsilon is 0.001 there and 1e-05" in said
    assert "leave out --hidden-size --norm-epsilon" in said
