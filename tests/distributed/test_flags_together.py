"""Flags of existing scripts in a mixed run: they act, and change nothing that they should not."""

from __future__ import annotations

from pathlib import Path

from hetero.tools.runs import SIMULATED
from tests.distributed.harness import (
    MIXED,
    TINY_LLAMA,
    changed_entry,
    launch,
    launch_well,
    read_rows,
    train,
)
from tests.sentences import without_time

# What a script carries that was written for Megatron-LM and one vendor.
SCRIPT = (
    "--num-layers 6 --pipeline-model-parallel-size 1 --transformer-impl transformer_engine "
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
    "--step-batch-size-schedule 0:4,512:8 --split '8,1,1' --eval-iters 2 --eval-interval 3 "
    "--eval-global-batch-size 4 --eval-micro-batch-size 2 --bf16 --use-distributed-optimizer "
    "--use-precision-aware-optimizer --main-grads-dtype bf16 --use-persistent-ckpt-worker "
    "--dist-ckpt-optim-fully-reshardable --moe-grouped-gemm --tp-comm-overlap"
).split()
OVERLAPPED = ["--overlap-grad-reduce", "--overlap-param-gather"]


def _evaluations(text: str) -> list[str]:
    return [line for line in without_time(text).splitlines() if "loss value" in line]


def test_a_script_with_three_flags_more_is_the_run_it_was(corpus, tmp_path: Path) -> None:
    """--eval-micro-batch-size, --step-batch-size-schedule, --main-grads-dtype and the rest."""
    flags = [*TINY_LLAMA, *corpus.flags, "--train-iters", "6", *SCRIPT]
    flags[flags.index("--global-batch-size") + 1] = "8"
    mixed = train([*flags, *MIXED], 2, tmp_path / "mixed", environ=SIMULATED)
    # The same without what is said to do nothing, one stage after the other on one vendor.
    flags[flags.index("--pipeline-model-parallel-size") + 1] = "2"
    plain = train(flags[: flags.index("--use-persistent-ckpt-worker")], 2, tmp_path / "plain")
    assert mixed.numbers() == plain.numbers()
    assert _evaluations(mixed.stdout) == _evaluations(plain.stdout)
    assert len(_evaluations(mixed.stdout)) == 4
    rows = read_rows(tmp_path / "mixed/metrics.jsonl")
    # 512 tokens are 16 samples: four steps of 4, then 8.
    assert [row["batch_size"] for row in rows] == [4, 4, 4, 4, 8, 8]
    assert [stage["layers"] for stage in mixed.report["stages"]] == [[3], [3]]
    built = {stage["transformer_impl"] for stage in mixed.report["stages"]}
    assert built == {"local (TransformerEngine is not installed)"}
    assert "it is not installed for pipeline stage 0 (amd), 1 (nvidia)" in mixed.stdout
    for flag in ("--moe-grouped-gemm", "--tp-comm-overlap", "--use-persistent-ckpt-worker"):
        assert f"flag without effect here: {flag}: " in mixed.stdout


def test_the_weights_norm_is_of_updated_weights_where_gathering_them_waits(
    corpus, tmp_path: Path
) -> None:
    """--log-params-norm with --overlap-param-gather."""
    flags = [*TINY_LLAMA, *corpus.flags, "--use-distributed-optimizer", "--log-params-norm"]
    norms = []
    for name, overlap in (("at-once", []), ("later", OVERLAPPED)):
        train([*flags, *overlap], 2, tmp_path / name)
        norms.append([row["params_norm"] for row in read_rows(tmp_path / name / "metrics.jsonl")])
    assert norms[0] == norms[1]


SLIP = """
from megatron.hetero import trainer

train_step = trainer.Trainer.train_step

def slipping(self, batches):
    if self.iteration == 2:
        next(self.model.chunks[0].parameters()).data.view(-1)[0] += 1e-3
    train_step(self, batches)

trainer.Trainer.train_step = slipping
"""


def test_weights_that_differ_between_replicas_end_the_run(corpus, tmp_path: Path) -> None:
    """--check-weight-hash-across-dp-replicas-interval: rank 1's weights slip in its third step."""
    flags = [*TINY_LLAMA, *corpus.flags, "--train-iters", "5"]
    flags += ["--check-weight-hash-across-dp-replicas-interval", "2"]
    outcomes = launch(flags, 2, scripts={1: changed_entry(tmp_path, SLIP)})
    assert [outcome.code for outcome in outcomes] == [1, 1]
    spoken = outcomes[0].stderr + outcomes[1].stderr
    assert "the weights of data-parallel ranks differ after iteration 4: rank 1 on " in spoken
    assert spoken.count("error:") == 1


LATE = """
import time
import torch.distributed as dist

irecv = dist.irecv

def late(*args, **kwargs):
    time.sleep(0.05)
    return irecv(*args, **kwargs)

dist.irecv = late
"""


def test_an_evaluation_ends_only_when_its_last_send_has_arrived(corpus, tmp_path: Path) -> None:
    """--overlap-p2p-communication-warmup-flush: stage 1 asks for it when stage 0 is done."""
    flags = [*TINY_LLAMA, *corpus.flags, "--train-iters", "2", "--eval-iters", "1"]
    flags += "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2".split()
    flags += ["--overlap-p2p-communication-warmup-flush"]
    said, _ = launch_well(flags, 2, scripts={1: changed_entry(tmp_path, LATE)})
    assert len(_evaluations(said)) == 1


# Fill-in-the-middle: both ends of the pipeline reorder a sample in the same way.


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
