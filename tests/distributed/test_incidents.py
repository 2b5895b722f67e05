"""What happened in a run, in its --hetero-report: of all ranks, with time, rank and cause."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hetero.tools.runs import SIMULATED
from tests.distributed.harness import (
    MIXED,
    TINY_LLAMA,
    changed_entry,
    finish,
    launch,
    start,
    train,
    wait_for_steps,
)

UNWRITABLE = """
import resource
from megatron.hetero.checkpoint.saver import Saver

started = Saver.start

def start(self, iteration, contents):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if iteration == 2 else -1, -1))
    started(self, iteration, contents)

Saver.start = start
"""
SPOILT_WEIGHT = """
from megatron.hetero.trainer import Trainer

step = Trainer.train_step

def spoil_and_step(self, batches):
    if self.iteration == 2:
        self.model.named_parameters()[0][1].data.fill_(float("nan"))
    step(self, batches)

Trainer.train_step = spoil_and_step
"""
LAST_MOMENT = """
from hetero.observe.record import recorder
from megatron.hetero.checkpoint.checkpointer import Checkpointer

finish = Checkpointer.finish

def finish_and_tell(self):
    finish(self)
    recorder().add_incident("rail lost", "in the last second", peer=0, rail="1")

Checkpointer.finish = finish_and_tell
"""
DIVERGES = "--lr 1e30 --min-lr 1e29 --lr-warmup-iters 0 --clip-grad 0".split()


def kinds(incidents: list[Mapping[str, Any]]) -> list[tuple[str, int]]:
    return [(one["kind"], one["iteration"]) for one in incidents]


@pytest.mark.parametrize("asynchronous", ["", "--async-save"], ids=["waiting", "background"])
def test_saves_that_end_well_and_badly_and_evaluations(
    corpus, tmp_path: Path, asynchronous: str
) -> None:
    """Rank 1 cannot write its part of iteration 2: the kernel's limit on files plays the disk."""
    limited = changed_entry(tmp_path, UNWRITABLE)
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--save", str(tmp_path / "checkpoints")]
    flags += ["--save-interval", "2", "--eval-iters", "1", "--eval-interval", "2"]
    begun = time.time()
    ended = train(
        [*flags, *asynchronous.split()],
        2,
        tmp_path / "run",
        environ=SIMULATED,
        scripts={1: limited},
    )
    incidents = ended.report["incidents"]
    saves = [one for one in incidents if one["kind"].startswith("checkpoint")]
    assert kinds(saves) == [
        ("checkpoint begun", 2),
        ("checkpoint failed", 2),
        ("checkpoint begun", 4),
        ("checkpoint saved", 4),
    ]
    assert "rank 1: File too large" in saves[1]["text"]
    files = (tmp_path / "checkpoints" / "iter_0000004").glob("*.safetensors")
    assert saves[3]["bytes"] == sum(file.stat().st_size for file in files)
    assert 0 < saves[3]["seconds"] < 120
    evaluations = [one for one in incidents if one["kind"] == "evaluation"]
    assert {one["split"] for one in evaluations} >= {"validation"}
    assert kinds(evaluations)[:2] == [("evaluation", 2), ("evaluation", 4)]
    for one in evaluations:
        assert f"{one['split']} loss {one['loss']:.6f}, " in one["text"]
    times = [one["time"] for one in incidents]
    assert begun <= times[0] <= times[-1] <= time.time()
    assert times == sorted(times)
    assert {one["rank"] for one in incidents} == {0}
    assert ended.report["ended"] is None


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_loss_that_is_not_a_number_and_what_is_skipped_for_it(
    corpus, tmp_path: Path, nproc: int
) -> None:
    """A weight of rank 0 is spoilt before iteration 3. One rank alone has no liveness."""
    mixed, environ = (MIXED, SIMULATED) if nproc == 2 else ([], {})
    flags = [*TINY_LLAMA, *corpus.flags, *mixed, "--no-check-for-nan-in-loss-and-grad"]
    script = changed_entry(tmp_path, SPOILT_WEIGHT)
    ended = train(flags, nproc, tmp_path / "run", environ=environ, scripts={0: script})
    told = [one for one in ended.report["incidents"] if one["kind"] in ("nan", "skipped")]
    assert kinds(told) == [("nan", 3), ("nan", 4)]
    text = "the loss of iteration {} is nan; its weights were not updated"
    vendor = "amd" if nproc == 2 else "cpu"
    where = (
        f"; rank 0 on {socket.gethostname()} (stage 0, {vendor}) has a weight that is not finite "
        "(embedding.word_embeddings.weight)"
    )
    assert [one["text"] for one in told] == [text.format(3) + where, text.format(4)]
    assert told[0]["ranks"] == [0]
    assert [one["loss"] for one in told] == [None, None]
    said = f"warning: {text.format(3)}{where}, and training"
    assert ended.stdout.count(said) == ended.stdout.count("training goes on") == 1


SPOILT_GRADIENT = """
import torch
from megatron.hetero.optimizer import TrainingOptimizer

prepare = TrainingOptimizer.step
steps = []

def spoil_and_step(self, **given):
    steps.append(None)
    if len(steps) == 3:
        name = "decoder.layers.1.mlp.linear_fc1.weight"
        (parameter,) = [p for n, p in MODEL[0].named_parameters() if n == name]
        parameter.main_grad[0, 0] = float("inf")
    return prepare(self, **given)

TrainingOptimizer.step = spoil_and_step

from megatron.hetero import trainer

MODEL = []
build = trainer.build_model

def kept(*given, **more):
    MODEL.append(build(*given, **more))
    return MODEL[0]

trainer.build_model = kept
"""


def test_a_gradient_that_is_not_finite_ends_the_run_with_its_rank_and_parameter(
    corpus, tmp_path: Path
) -> None:
    script = changed_entry(tmp_path, SPOILT_GRADIENT)
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED]
    outcomes = launch(flags, 2, environ=SIMULATED, scripts={0: script})
    assert [outcome.code for outcome in outcomes] == [1, 1]
    told = (
        "the gradient norm of iteration 3 is inf; its weights were not updated; the first gradient "
        "that is not finite is that of decoder.layers.1.mlp.linear_fc1.weight at rank 0 on "
        f"{socket.gethostname()} (stage 0, amd): lower --lr"
    )
    assert told in outcomes[0].stderr + outcomes[1].stderr


def test_gradients_that_are_not_numbers(corpus, tmp_path: Path) -> None:
    flags = [*TINY_LLAMA, *corpus.flags, *DIVERGES, "--no-check-for-nan-in-loss-and-grad"]
    ended = train(flags, 1, tmp_path / "run")
    told = [one for one in ended.report["incidents"] if one["kind"] == "nan"]
    bad = [number for number, skipped in enumerate(ended.skipped, 1) if skipped]
    assert bad
    first = (
        "; the first gradient that is not finite is that of embedding.word_embeddings.weight at "
        f"rank 0 on {socket.gethostname()} (stage 0, cpu)"
    )
    assert [one["text"] for one in told] == [
        f"the gradient norm of iteration {number} is nan; its weights were not updated"
        # Of several in a row the first.
        f"{first if number - 1 not in bad else ''}"
        for number in bad
    ]
    assert [one["loss"] for one in told] == [ended.losses[number - 1] for number in bad]


def test_overflows_of_fp16_and_the_loss_scale_after_them(corpus, tmp_path: Path) -> None:
    flags = [*TINY_LLAMA, *corpus.flags, "--fp16", "--initial-loss-scale", str(2.0**40)]
    flags += ["--hysteresis", "1"]
    ended = train([*flags, *MIXED], 2, tmp_path / "run", environ=SIMULATED)
    incidents = ended.report["incidents"]
    skipped = [one for one in incidents if one["kind"] == "skipped"]
    bad = [number for number, was in enumerate(ended.skipped, 1) if was]
    assert bad
    assert [one["iteration"] for one in skipped] == bad
    scales = [one for one in incidents if one["kind"] == "loss scale"]
    assert scales
    assert all(one["loss_scale"] < 2.0**40 for one in scales)
    assert "training goes on" not in ended.stdout


def test_what_a_rank_tells_in_its_last_second(corpus, tmp_path: Path) -> None:
    """No heartbeat brings it to rank 0 any more."""
    script = changed_entry(tmp_path, LAST_MOMENT)
    ended = train(
        [*TINY_LLAMA, *corpus.flags, *MIXED],
        2,
        tmp_path / "run",
        environ=SIMULATED,
        scripts={0: script, 1: script},
    )
    told = [one for one in ended.report["incidents"] if one["kind"] == "rail lost"]
    assert sorted(one["rank"] for one in told) == [0, 1]


def test_a_run_that_loses_a_rank_reports_which_and_why_it_ended(corpus, tmp_path: Path) -> None:
    metrics, report = tmp_path / "metrics.jsonl", tmp_path / "report.json"
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--train-iters", "100000"]
    flags += ["--metrics-file", str(metrics), "--hetero-report", str(report)]
    processes = start(flags, 2, environ=SIMULATED)
    wait_for_steps(metrics, 3)
    processes[1].send_signal(signal.SIGKILL)
    outcomes = finish(processes, seconds=120)
    assert outcomes[0].code == 1
    written = json.loads(report.read_text())
    named = f"rank 1 on {socket.gethostname()}"
    (lost,) = [one for one in written["incidents"] if one["kind"] == "rank lost"]
    assert lost["text"].startswith(f"{named} exited without reporting an error (last heard at ")
    assert (lost["rank"], lost["lost"]) == (0, 1)
    assert named in written["ended"]
    assert written["iterations"] >= 3
    assert [rank["stage"] for rank in written["ranks"]] == [0, 1]


def test_a_run_that_ends_by_its_loss_reports_that(corpus, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, *DIVERGES, "--hetero-report", str(report)]
    outcomes = launch(flags, 2, environ=SIMULATED)
    assert [outcome.code for outcome in outcomes] == [1, 1]
    written = json.loads(report.read_text())
    assert written["incidents"][-1]["kind"] in ("nan", "skipped")
    assert written["ended"].startswith("the ")
    assert "pass --no-check-for-nan-in-loss-and-grad" in written["ended"]
