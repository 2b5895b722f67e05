"""Runs that stop and go on: the same bits as a run that never stopped, in any layout.

The quick part proves each mechanism once; `-m slow` runs the whole matrix.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron.training.checkpoint.folder import TRACKER
from megatron.training.checkpoint.reader import CheckpointReader
from tests.distributed.harness import (
    ENTRY,
    ROOT,
    TINY_LLAMA,
    finish,
    launch,
    start,
    train,
    wait_for,
)

PLAYED = {"HETERO_VENDOR": "plan"}
HETERO = "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1"
UNTIED = "--untie-embeddings-and-output-weights"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
LOSS_SCALE = "--fp16 --initial-loss-scale 67108864 --hysteresis 1 --loss-scale-window 4"
slow = pytest.mark.slow


@dataclass(frozen=True)
class Run:
    """A layout and an optimizer; `mixed` runs play two vendors."""

    name: str
    nproc: int
    flags: str
    steps: int = 20

    def __str__(self) -> str:
        return self.name

    @property
    def environ(self) -> dict[str, str] | None:
        return PLAYED if "--hetero-pipeline" in self.flags else None


RESUMES = [
    Run(
        "mixed-pp2-uneven-dp2-distributed-adam-bf16-dropout-evaluation-async",
        4,
        f"{HETERO} --hetero-pipeline-layers 3 1 --bf16 --use-distributed-optimizer {DROPOUT} "
        "--overlap-grad-reduce --overlap-param-gather --eval-iters 1 --eval-interval 2 "
        "--async-save",
        steps=6,
    ),
    Run(
        "tp2-sequence-parallel-fp16-loss-scaler",
        2,
        f"--tensor-model-parallel-size 2 --sequence-parallel {LOSS_SCALE}",
        steps=6,
    ),
]
MATRIX = [
    Run("adam", 1, ""),
    Run("adam-untied-dropout", 1, f"{UNTIED} {DROPOUT}"),
    Run("adam-bf16", 1, "--bf16"),
    Run("adam-bf16-gradients-in-bf16", 1, "--bf16 --grad-reduce-in-bf16"),
    Run("adam-fp16-loss-scaler", 1, LOSS_SCALE),
    Run("adam-fp16-constant-loss-scale", 1, "--fp16 --loss-scale 1024"),
    Run("sgd", 1, "--optimizer sgd --lr 0.1"),
    Run("sgd-without-momentum", 1, "--optimizer sgd --lr 0.1 --sgd-momentum 0"),
    Run("sgd-bf16", 1, "--optimizer sgd --lr 0.1 --bf16"),
    Run("sgd-fp16-loss-scaler", 1, f"--optimizer sgd --lr 0.1 {LOSS_SCALE}"),
    Run("adam-with-biases-and-learned-positions", 1, "--position-embedding-type learned_absolute"),
    Run("growing-batch-cyclic-data", 1, "--rampup-batch-size 2 2 48 --dataloader-type cyclic"),
    Run("weight-decay-that-grows", 1, "--weight-decay-incr-style cosine "
        "--start-weight-decay 0.01 --end-weight-decay 0.2"),
    Run("dp2", 2, f"{DROPOUT}"),
    Run("dp2-distributed", 2, f"--use-distributed-optimizer {DROPOUT}"),
    Run("dp2-distributed-bf16-overlap", 2, "--use-distributed-optimizer --bf16 "
        "--overlap-grad-reduce --overlap-param-gather"),
    Run("dp2-distributed-fp16", 2, f"--use-distributed-optimizer {LOSS_SCALE}"),
    Run("dp2-sgd-bf16", 2, "--optimizer sgd --lr 0.1 --bf16"),
    Run("tp2", 2, f"--tensor-model-parallel-size 2 {DROPOUT}"),
    Run("tp2-sequence-parallel-distributed-bf16", 2, "--tensor-model-parallel-size 2 "
        f"--sequence-parallel --use-distributed-optimizer --bf16 {UNTIED} {DROPOUT}"),
    Run("pp2-tied", 2, "--pipeline-model-parallel-size 2"),
    Run("pp2-interleaved-untied", 2, "--pipeline-model-parallel-size 2 "
        f"--num-virtual-stages-per-pipeline-rank 2 {UNTIED} {DROPOUT}"),
    Run("mixed-pp2-tied-async", 2, f"{HETERO} --async-save"),
    Run("mixed-pp2-interleaved-bf16", 2, f"{HETERO} --num-virtual-stages-per-pipeline-rank 2 "
        f"--bf16 {DROPOUT}"),
    Run("mixed-pp4-uneven", 4, "--hetero-pipeline --hetero-vendors amd nvidia "
        f"--hetero-pipeline-sizes 1 3 --hetero-pipeline-layers 1 3 3 1 --num-layers 8 {UNTIED}"),
    Run("mixed-pp4-interleaved-distributed", 4, "--hetero-pipeline --hetero-vendors amd nvidia amd "
        "--hetero-pipeline-sizes 1 2 1 --num-layers 8 --num-layers-per-virtual-pipeline-stage 1 "
        "--use-distributed-optimizer"),
    Run("mixed-pp2-tp2-sequence-parallel-distributed", 4, f"{HETERO} --sequence-parallel "
        f"--tensor-model-parallel-size 2 --use-distributed-optimizer --bf16 {DROPOUT}"),
    Run("mixed-pp2-dp2-tied-fp16", 4, f"{HETERO} --use-distributed-optimizer {LOSS_SCALE}"),
]  # fmt: skip


@pytest.mark.parametrize("run", [*RESUMES, *(pytest.param(r, marks=slow) for r in MATRIX)], ids=str)
def test_a_resumed_run_computes_the_same_bits(run: Run, corpus, tmp_path: Path) -> None:
    half = run.steps // 2
    flags = [*TINY_LLAMA, *corpus.flags, *run.flags.split(), "--train-iters", str(run.steps)]
    folder = tmp_path / "checkpoints"
    saving = ["--save", str(folder), "--save-interval", str(half)]
    straight = train([*flags, *saving], run.nproc, tmp_path / "straight", environ=run.environ)
    again = ["--load", str(folder), "--ckpt-step", str(half)]
    resumed = train([*flags, *again], run.nproc, tmp_path / "resumed", environ=run.environ)

    assert len(straight.losses) == run.steps
    assert resumed.losses == straight.losses[half:]
    assert resumed.grad_norms == straight.grad_norms[half:]
    assert resumed.skipped == straight.skipped[half:]
    assert resumed.weights == straight.weights
    assert resumed.report["consumed_samples"] == straight.report["consumed_samples"]
    assert _evaluations(straight.stdout)[-2:] == _evaluations(resumed.stdout)[-2:]
    assert any(straight.skipped) == ("--initial-loss-scale" in run.flags)
    assert (folder / TRACKER).read_text() == str(run.steps)
    for rank in straight.report["ranks"]:
        _require_told_costs(rank, folder, iterations=[half, run.steps])
    assert straight.stdout.count("; training stood still for ") == 2


def _require_told_costs(rank: dict, folder: Path, *, iterations: list[int]) -> None:
    """What the report says of a rank's saves is what lies on the disk."""
    saves = rank["saves"]
    assert [save["iteration"] for save in saves] == iterations
    assert rank["saving_seconds"] == sum(save["stood_still_s"] for save in saves)
    for save in saves:
        file = folder / f"iter_{save['iteration']:07d}" / f"rank_{rank['rank']:05d}.safetensors"
        assert save["bytes"] == file.stat().st_size
        assert save["written_s"] > 0
        assert save["stood_still_s"] > save["memory_wait_s"] >= 0


def _evaluations(log: str) -> list[str]:
    return [line for line in log.splitlines() if "loss at" in line]


def test_a_run_goes_on_under_other_layouts(corpus, tmp_path: Path) -> None:
    """One stage, then two of two vendors, then one again: the losses of one stage throughout."""
    flags = [*TINY_LLAMA, *corpus.flags, UNTIED, "--clip-grad", "0.0"]
    folder = tmp_path / "checkpoints"
    kept = ["--save", str(folder), "--load", str(folder)]
    straight = train(flags, 1, tmp_path / "straight")
    legs = [
        train([*flags, *kept, "--exit-interval", "2"], 1, tmp_path / "one"),
        train(
            [
                *(*flags, *kept, *HETERO.split(), "--hetero-pipeline-layers", "1", "3"),
                *("--exit-interval", "4"),
            ],
            2,
            tmp_path / "two",
            environ=PLAYED,
        ),
        train([*flags, *kept], 1, tmp_path / "three"),
    ]

    assert "training starts from the initial weights" in legs[0].stdout
    assert [loss for leg in legs for loss in leg.losses] == straight.losses
    assert legs[-1].weights == straight.weights
    with CheckpointReader.open(folder) as last:
        assert last.run["iteration"] == 6
    with CheckpointReader.open(folder, iteration=4) as middle:
        assert middle.run["simulated"] is True


LAYOUTS = [
    Run("one", 1, ""),
    Run("dp2", 2, ""),
    Run("dp2-distributed", 2, "--use-distributed-optimizer"),
    Run("tp2", 2, "--tensor-model-parallel-size 2"),
    Run("mixed-pp2-uneven", 2, f"{HETERO} --hetero-pipeline-layers 3 1"),
    Run("other-vendor-order", 2, "--hetero-pipeline --hetero-vendors nvidia amd "
        "--hetero-pipeline-sizes 1 1 --hetero-pipeline-layers 1 3"),
    Run("pp2-interleaved", 2, "--pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2"),
    Run("mixed-pp2-tp2-sequence-parallel-distributed", 4, f"{HETERO} --sequence-parallel "
        "--tensor-model-parallel-size 2 --use-distributed-optimizer"),
    Run("mixed-pp2-dp2-distributed", 4, f"{HETERO} --use-distributed-optimizer"),
    Run("pp4", 4, "--pipeline-model-parallel-size 4"),
    Run("mixed-pp4", 4, "--hetero-pipeline --hetero-vendors amd nvidia "
        "--hetero-pipeline-sizes 1 3"),
    Run("tp4", 4, "--tensor-model-parallel-size 4 --sequence-parallel "
        "--use-distributed-optimizer"),
]  # fmt: skip


@slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", ["", "--bf16"], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_layout_reads_what_every_other_wrote(
    precision: str, tied: bool, corpus, tmp_path: Path
) -> None:
    """Round and round: each layout loads the one before it and writes all again, bit for bit."""
    flags = [*TINY_LLAMA, *corpus.flags, *precision.split(), *([] if tied else [UNTIED])]
    flags += ["--make-vocab-size-divisible-by", "512", "--add-qkv-bias", "--train-iters", "3"]
    flags += ["--num-query-groups", "4"]
    first = tmp_path / "first"
    train([*flags, "--save", str(first)], 1, tmp_path / "run")
    known = _everything(first)
    before = first
    for run in [*LAYOUTS[1:], LAYOUTS[0]]:
        flags_of_vocabulary = ["--make-vocab-size-divisible-by", str(512 // _tensor_size(run))]
        after = tmp_path / run.name
        moved = ["--load", str(before), "--save", str(after)]
        train(
            [*flags, *flags_of_vocabulary, *run.flags.split(), *moved],
            run.nproc,
            tmp_path / f"to {run}",
            environ=run.environ,
        )
        found = _everything(after)
        assert found.keys() == known.keys(), run
        for name in known:
            assert torch.equal(found[name], known[name]), (run, name)
        before = after


def _tensor_size(run: Run) -> int:
    words = run.flags.split()
    name = "--tensor-model-parallel-size"
    return int(words[words.index(name) + 1]) if name in words else 1


def _everything(folder: Path) -> dict[str, torch.Tensor]:
    with CheckpointReader.open(folder) as reader:
        names = [n for n in reader.names(optimizer=True) if not n.startswith("rng.")]
        assert reader.run["iteration"] == 3
        assert reader.run["optimizer_step"] == 3
        return {name: reader.tensor(name) for name in names}


@slow
@pytest.mark.parametrize(
    ("first", "then"),
    [(0, 2), (2, 0), (0, 3), (3, 8), (7, 4), (8, 7)],
    ids=lambda index: str(LAYOUTS[index]),
)
def test_training_goes_on_closely_where_the_order_of_sums_changes(
    first: int, then: int, corpus, tmp_path: Path
) -> None:
    """Another TP or DP adds in another order; the loss curve is the same to float32's rounding."""
    flags = [*TINY_LLAMA, *corpus.flags, "--train-iters", "10"]
    flags += ["--make-vocab-size-divisible-by", "256"]
    folder = tmp_path / "checkpoints"
    one, other = LAYOUTS[first], LAYOUTS[then]
    straight = train(
        [*flags, *one.flags.split(), "--save", str(folder), "--save-interval", "5"],
        one.nproc,
        tmp_path / "one",
        environ=one.environ,
    )
    moved = train(
        [*flags, *other.flags.split(), "--load", str(folder), "--ckpt-step", "5"],
        other.nproc,
        tmp_path / "other",
        environ=other.environ,
    )
    assert moved.losses == pytest.approx(straight.losses[5:], rel=1e-4)


def test_sigterm_saves_and_a_damaged_checkpoint_is_passed_over(corpus, tmp_path: Path) -> None:
    folder, metrics = tmp_path / "checkpoints", tmp_path / "metrics.jsonl"
    flags = [*TINY_LLAMA, *corpus.flags, "--train-iters", "100000", "--lr-decay-iters", "1000"]
    flags += ["--save", str(folder), "--load", str(folder), "--keep-last", "2"]
    flags += ["--save-interval", "3", "--metrics-file", str(metrics)]
    processes = start([*flags, "--exit-signal-handler"], 1)
    tracker = folder / TRACKER
    wait_for(lambda: tracker.exists() and int(tracker.read_text()) >= 9, seconds=60, what="a save")
    processes[0].send_signal(signal.SIGTERM)
    (outcome,) = finish(processes, seconds=60)
    assert outcome.code == 0, outcome.stderr
    last = int(tracker.read_text())
    assert f"stopping at iteration {last}, as SIGTERM asks" in outcome.stdout
    assert len(metrics.read_text().splitlines()) == last
    kept = sorted(path.name for path in folder.glob("iter_*"))
    assert len(kept) == 2
    assert kept[-1] == f"iter_{last:07d}"

    (part,) = (folder / kept[-1]).glob("*.safetensors")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    (outcome,) = launch([*flags, "--exit-interval", "3"], 1)
    assert outcome.code == 0, outcome.stderr
    assert f"{kept[-1]} is not used: {part.name} has other bytes" in outcome.stdout
    assert f"{kept[0]} loaded" in outcome.stdout
    rows = [json.loads(line)["iteration"] for line in metrics.read_text().splitlines()]
    assert rows == list(range(1, len(rows) + 1))
    assert int(tracker.read_text()) == rows[-1]


def test_a_checkpoint_of_another_model_is_refused_before_training(corpus, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    flags = [*TINY_LLAMA, *corpus.flags]
    assert launch([*flags, "--train-iters", "2", "--save", str(folder)], 1)[0].code == 0
    other = [*flags, *HETERO.split(), "--load", str(folder), "--ffn-hidden-size", "96"]
    outcomes = launch(other, 2, environ=PLAYED)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    spoken = "".join(outcome.stderr for outcome in outcomes)
    assert spoken.count("error:") == 1
    assert "--ffn-hidden-size is 64 there and 96 here" in spoken
    assert all("iteration" not in outcome.stdout for outcome in outcomes)


LIMITED = """
import resource, runpy
from megatron.training.checkpoint.saver import Saver

started = Saver.start

def start(self, iteration, contents):
    full = iteration == 4
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if full else -1, -1))
    started(self, iteration, contents)

Saver.start = start
runpy.run_path({entry!r}, run_name="__main__")
"""


@slow
@pytest.mark.parametrize("asynchronous", ["", "--async-save"], ids=["waiting", "background"])
@pytest.mark.parametrize("ends", [False, True], ids=["goes-on", "ends"])
def test_a_disk_that_is_full_during_a_save_loses_nothing(
    asynchronous: str, ends: bool, corpus, tmp_path: Path
) -> None:
    """One rank cannot write its part of iteration 4: the kernel's limit on files plays the disk."""
    limited = tmp_path / "limited.py"
    limited.write_text(LIMITED.format(entry=str(ENTRY)))
    folder = tmp_path / "checkpoints"
    flags = [*TINY_LLAMA, *corpus.flags, "--pipeline-model-parallel-size", "2"]
    flags += ["--save", str(folder), "--save-interval", "2", *asynchronous.split()]
    flags += ["--exit-on-save-failure"] if ends else []
    outcomes = launch(flags, 2, scripts={1: limited})

    spoken = "".join(outcome.stderr for outcome in outcomes)
    sentence = "the checkpoint of iteration 4 could not be written"
    assert "Traceback" not in spoken
    names = sorted(path.name for path in folder.iterdir())
    if ends:
        assert [outcome.code for outcome in outcomes] == [1, 1]
        assert spoken.count(sentence) == 1
        assert names == ["iter_0000002", TRACKER]
    else:
        assert [outcome.code for outcome in outcomes] == [0, 0], spoken
        assert f"warning: {sentence}" in outcomes[0].stdout
        assert names == ["iter_0000002", "iter_0000006", TRACKER]
    with CheckpointReader.open(folder) as reader:
        assert reader.run["iteration"] == (2 if ends else 6)


UNPINNED = """
import runpy
from hetero.device.cpu import CpuRuntime
from hetero.errors import LinkError
from megatron.training.checkpoint.host_memory import HostMemory
from megatron.training.checkpoint.saver import Saver

calls = []
begun, started = HostMemory.__init__, Saver.start

def begin(self, size, runtime):
    print("memory is asked for", flush=True)
    begun(self, size, runtime)

def register(self, host):
    calls.append(host)
    if len(calls) == 1:
        raise LinkError("the driver pins nothing")

def start(self, iteration, contents):
    print(f"save {{iteration}} starts", flush=True)
    started(self, iteration, contents)

HostMemory.__init__, CpuRuntime.register, Saver.start = begin, register, start
runpy.run_path({entry!r}, run_name="__main__")
"""


def test_memory_for_copies_is_made_before_a_save_is_due_and_its_lack_ends_nothing(
    corpus, tmp_path: Path
) -> None:
    unpinned = tmp_path / "unpinned.py"
    unpinned.write_text(UNPINNED.format(entry=str(ENTRY)))
    folder = tmp_path / "checkpoints"
    flags = [*TINY_LLAMA, *corpus.flags, "--async-save"]
    flags += ["--save", str(folder), "--save-interval", "3"]
    (outcome,) = launch(flags, 1, scripts={0: unpinned})

    assert outcome.code == 0, outcome.stderr
    log = outcome.stdout
    assert log.index("memory is asked for") < log.index("save 3 starts")
    reason = "no host memory for a copy of the weights (the driver pins nothing)"
    assert f"warning: the checkpoint of iteration 3 could not be written to {folder}" in log
    assert reason in log
    assert sorted(path.name for path in folder.iterdir()) == ["iter_0000006", TRACKER]


# Loads the program once and forks a life of it for every line of flags.
LIVES = """
import os, sys
import megatron.training.cpu_shim, megatron.training.session
from megatron.training.pretrain import pretrain

for line in sys.stdin:
    life = os.fork()
    if life == 0:
        os.dup2(2, 1)
        os._exit(pretrain(line.split()))
    print(life, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(life, 0)[1]), flush=True)
"""


class Lives:
    """One run after the other of one program, each in a process of its own."""

    def __init__(self, log: Path) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._log = log.open("w")
        self._program = subprocess.Popen(
            [sys.executable, "-c", LIVES],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def begin(self, flags: list[str]) -> int:
        """The process of a new life."""
        assert self._program.stdin is not None
        self._program.stdin.write(" ".join(flags) + "\n")
        self._program.stdin.flush()
        return self._number()

    def end(self) -> int:
        """How it ended."""
        return self._number()

    def _number(self) -> int:
        assert self._program.stdout is not None
        line = self._program.stdout.readline()
        assert line, Path(self._log.name).read_text()[-3000:]
        return int(line)

    def __enter__(self) -> Lives:
        return self

    def __exit__(self, *_: object) -> None:
        self._program.kill()
        self._program.communicate()
        self._log.close()


@slow
@pytest.mark.timeout(1800)
def test_a_run_killed_at_fifty_moments_loses_nothing(corpus, tmp_path: Path) -> None:
    """Killed while it saves after every step, started again, killed again; then it goes on as if
    it had never been."""
    folder, metrics = tmp_path / "checkpoints", tmp_path / "metrics.jsonl"
    flags = [*TINY_LLAMA, *corpus.flags, "--train-iters", "100000"]
    saving = ["--save", str(folder), "--load", str(folder), "--save-interval", "1"]
    saving += ["--keep-last", "3", "--metrics-file", str(metrics)]
    moments = random.Random(20)
    tracker = folder / TRACKER
    known = unfinished = 0
    with Lives(tmp_path / "log") as lives:
        for number in range(50):
            before = _lines(metrics)
            life = lives.begin([*flags, *saving, *(["--async-save"] if number % 2 else [])])
            try:
                wait_for(lambda: _lines(metrics) != before, seconds=120, what="training")  # noqa: B023
                time.sleep(moments.uniform(0.0, 0.3))
                known = max(known, int(tracker.read_text())) if tracker.exists() else known
            finally:
                os.kill(life, signal.SIGKILL)
            assert lives.end() == -signal.SIGKILL
            unfinished += any(folder.glob("*.saving"))
            if known:
                with CheckpointReader.open(folder) as reader:
                    assert reader.run["iteration"] >= known
                    assert reader.folder.name == f"iter_{int(tracker.read_text()):07d}"
        last = str(int(tracker.read_text()) + 5)
        lives.begin([*flags, *saving, "--exit-interval", last])
        assert lives.end() == 0, (tmp_path / "log").read_text()[-3000:]
    assert not list(folder.glob("*.saving"))
    straight = train([*flags, "--exit-interval", last], 1, tmp_path / "straight")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["loss"] for row in rows] == straight.losses
    assert unfinished > 0, "no kill came while a checkpoint was being written"


def _lines(metrics: Path) -> str:
    return metrics.read_text() if metrics.exists() else ""
