"""A run across two (simulated) vendors that takes its model from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.harness import MIXED, TINY_LLAMA, train
from tools.runs import SIMULATED

MODEL = (
    "--apply-layernorm-1p --rotary-seq-len-interpolation-factor 4 --apply-query-key-layer-scaling "
    "--norm-epsilon 1e-3 --hidden-dropout 0.2 --attention-dropout 0.2"
).split()
# Nothing of the model, of its tokenizer or of the length of its samples.
RUN = (
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 3e-3 --min-lr 3e-4 "
    "--lr-decay-style cosine --lr-warmup-iters 1 --weight-decay 0.1 --clip-grad 1.0 "
    "--log-interval 1 --eval-iters 0 --num-workers 0"
).split()


def test_a_run_that_types_nothing_of_the_model_goes_on_with_the_same_losses(
    corpus, tmp_path: Path
) -> None:
    saving = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "2"]
    typed = [*TINY_LLAMA, *MODEL, *corpus.flags, *RUN, *MIXED, *saving]
    straight = train(typed, 2, tmp_path / "straight", environ=SIMULATED)
    data = corpus.flags[corpus.flags.index("--data-path") :]
    resume = ["--load", str(tmp_path / "checkpoints"), "--ckpt-step", "2", "--use-checkpoint-args"]
    resumed = train([*RUN, *MIXED, *data, *resume], 2, tmp_path / "resumed", environ=SIMULATED)
    assert resumed.losses == straight.losses[2:]
    assert resumed.weights == straight.weights
    (taken,) = [line for line in resumed.stdout.splitlines() if line.startswith("taken from ")]
    for flag in (*MODEL[:4], "--norm-epsilon 0.001", "--hidden-dropout 0.2", "--num-layers 4"):
        assert flag in taken
