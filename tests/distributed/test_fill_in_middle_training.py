"""Fill-in-the-middle in a mixed run: both ends of the pipeline reorder a sample in the same way."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.harness import MIXED, TINY_LLAMA, train
from tools.runs import SIMULATED

# Bytes that the text does not hold stand for tokens that the tokenizer was not given.
FIM = (
    "--fim-data --fim-rate 0.8 --fim-prefix-token <0x01> --fim-middle-token <0x02> "
    "--fim-suffix-token <0x03> --fim-pad-token <0x04> --fim-eod-token </s>"
).split()


def test_a_mixed_run_that_is_resumed_reads_what_a_homogeneous_run_reads(
    corpus, tmp_path: Path
) -> None:
    flags = [*TINY_LLAMA, *corpus.flags]
    fim = [*flags, *FIM]
    plain = train([*fim, "--pipeline-model-parallel-size", "2"], 2, tmp_path / "plain")
    saved = ["--save", str(tmp_path / "saved"), "--save-interval", "2"]
    begun = [*fim, *MIXED, *saved, "--exit-interval", "2"]
    first = train(begun, 2, tmp_path / "first", environ=SIMULATED)
    resumed = [*fim, *MIXED, "--load", str(tmp_path / "saved"), "--num-workers", "2"]
    second = train(resumed, 2, tmp_path / "second", environ=SIMULATED)
    assert [*first.losses, *second.losses] == plain.losses
    assert [*first.grad_norms, *second.grad_norms] == plain.grad_norms
    assert second.weights == plain.weights
    other = train(flags, 1, tmp_path / "other")
    assert other.losses[0] != plain.losses[0]
