"""Flags of existing scripts in a mixed run: they act, and change nothing that they should not."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

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
import torch
from megatron.hetero import trainer

train_step = trainer.Trainer.train_step

def slipping(self, batches):
    if self.iteration == 2:
        parameter = dict(self.model.named_parameters())[WHERE]
        parameter.data.view(-1).view(torch.int32)[0] ^= 1 << 12
    train_step(self, batches)

trainer.Trainer.train_step = slipping
"""


HOST = socket.gethostname()
LAYER = "decoder.layers.0.self_attention.linear_qkv.weight"
NORM = "decoder.layers.0.input_layernorm.weight"
EMBEDDING = "embedding.word_embeddings.weight"


@pytest.mark.parametrize(
    ("ranks", "layout", "where", "told"),
    [
        (
            3,
            ["--global-batch-size", "6"],
            LAYER,
            rf"rank 1 on {HOST} \(stage 0, cpu\) differs from most that hold the same, "
            rf"first in {LAYER}",
        ),
        (
            2,
            ["--hetero-data-parallel", "amd:1,nvidia:1"],
            LAYER,
            rf"rank 0 on {HOST} \(stage 0, amd\) and rank 1 on {HOST} \(stage 0, nvidia\) differ, "
            rf"first in {LAYER}, and which of them is wrong cannot be told",
        ),
        (
            2,
            ["--tensor-model-parallel-size", "2"],
            NORM,
            rf"rank 0 on {HOST} \(stage 0, cpu\) and rank 1 on {HOST} .* differ, first in ",
        ),
        (
            2,
            MIXED,
            "output_layer.weight",
            rf"rank 0 on {HOST} \(stage 0, amd\) and rank 1 on {HOST} \(stage 1, nvidia\) differ, "
            rf"first in {EMBEDDING}, ",
        ),
    ],
    ids=["data", "across-vendors", "tensor", "tied"],
)
def test_a_flipped_bit_of_what_ranks_have_in_common_ends_the_run_and_names_them(
    corpus, tmp_path: Path, ranks: int, layout: list[str], where: str, told: str
) -> None:
    """--check-weight-hash-across-dp-replicas-interval: of rank 1, before its third step."""
    flags = [*TINY_LLAMA, *corpus.flags, "--train-iters", "5", *layout]
    flags += ["--check-weight-hash-across-dp-replicas-interval", "2"]
    script = changed_entry(tmp_path, SLIP.replace("WHERE", repr(where)))
    environ = SIMULATED if "amd" in " ".join(layout) else {}
    outcomes = launch(flags, ranks, scripts={1: script}, environ=environ)
    assert [outcome.code for outcome in outcomes] == [1] * ranks
    spoken = "".join(outcome.stderr for outcome in outcomes)
    assert re.search(
        f"parameters that ranks have in common differ after iteration 4: {told}", spoken
    )
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
