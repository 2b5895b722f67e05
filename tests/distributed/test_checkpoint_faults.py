"""Saves that meet a signal, damage, a full disk or a kill: nothing before them is lost."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from hetero.tools.runs import SIMULATED
from megatron.hetero.checkpoint.folder import TRACKER
from megatron.hetero.checkpoint.reader import CheckpointReader
from tests.distributed.harness import (
    MIXED,
    TINY_LLAMA,
    changed_entry,
    finish,
    launch,
    read_rows,
    start,
    train,
    wait_for,
)

slow = pytest.mark.slow


def test_sigterm_saves_and_a_damaged_checkpoint_is_passed_over(corpus, tmp_path: Path) -> None:
    folder, metrics = tmp_path / "checkpoints", tmp_path / "metrics.jsonl"
    flags = [*TINY_LLAMA, *corpus.flags, "--train-iters", "100000", "--lr-decay-iters", "1000"]
    flags += ["--save", str(folder), "--load", str(folder), "--keep-last", "2"]
    flags += ["--save-interval", "3", "--metrics-file", str(metrics)]
    processes = start([*flags, "--exit-signal-handler"], 1)
    tracker = folder / TRACKER
    wait_for(lambda: tracker.exists() and int(tracker.read_text()) >= 9, seconds=120, what="a save")
    processes[0].send_signal(signal.SIGTERM)
    (outcome,) = finish(processes, seconds=120)
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
    rows = [row["iteration"] for row in read_rows(metrics)]
    assert rows == list(range(1, len(rows) + 1))
    assert int(tracker.read_text()) == rows[-1]


def test_a_checkpoint_of_another_model_is_refused_before_training(corpus, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    flags = [*TINY_LLAMA, *corpus.flags]
    assert launch([*flags, "--train-iters", "2", "--save", str(folder)], 1)[0].code == 0
    other = [*flags, *MIXED, "--load", str(folder), "--ffn-hidden-size", "96"]
    outcomes = launch(other, 2, environ=SIMULATED)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    spoken = "".join(outcome.stderr for outcome in outcomes)
    assert spoken.count("error:") == 1
    assert "--ffn-hidden-size is 64 there and 96 here" in spoken
    assert all("iteration" not in outcome.stdout for outcome in outcomes)


LIMITED = """
import resource
from megatron.hetero.checkpoint.saver import Saver

started = Saver.start

def start(self, iteration, contents):
    full = iteration == 4
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if full else -1, -1))
    started(self, iteration, contents)

Saver.start = start
"""


@slow
@pytest.mark.parametrize("asynchronous", ["", "--async-save"], ids=["waiting", "background"])
@pytest.mark.parametrize("ends", [False, True], ids=["goes-on", "ends"])
def test_a_disk_that_is_full_during_a_save_loses_nothing(
    asynchronous: str, ends: bool, corpus, tmp_path: Path
) -> None:
    """One rank cannot write its part of iteration 4: the kernel's limit on files plays the disk."""
    limited = changed_entry(tmp_path, LIMITED)
    folder = tmp_path / "checkpoints"
    flags = [*TINY_LLAMA, *corpus.flags, "--pipeline-model-parallel-size", "2"]
    flags += ["--save", str(folder), "--save-interval", "2", *asynchronous.split()]
    flags += ["--train-iters", "6"]
    flags += ["--exit-on-save-failure"] if ends else []
    outcomes = launch(flags, 2, scripts={1: limited})

    spoken = "".join(outcome.stderr for outcome in outcomes)
    sentence = "the checkpoint of iteration 4 could not be written"
    assert "Traceback" not in spoken
    names = sorted(p.name for p in folder.iterdir() if not p.name.startswith("tokenizer-"))
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
from hetero.errors import LinkError
from megatron.hetero.checkpoint.snapshot import DeviceToHostCopier
from megatron.hetero.checkpoint.snapshot import HostMemory
from megatron.hetero.checkpoint.saver import Saver

calls = []
begun, started = HostMemory.__init__, Saver.start

def begin(self, size, copies):
    print("memory is asked for", flush=True)
    begun(self, size, copies)

def register(self, host):
    calls.append(host)
    if len(calls) == 1:
        raise LinkError("the driver pins nothing")

def start(self, iteration, contents):
    print(f"save {iteration} starts", flush=True)
    started(self, iteration, contents)

HostMemory.__init__, DeviceToHostCopier.register, Saver.start = begin, register, start
"""


def test_memory_for_copies_is_made_before_a_save_is_due_and_its_lack_ends_nothing(
    corpus, tmp_path: Path
) -> None:
    unpinned = changed_entry(tmp_path, UNPINNED)
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
    assert [path.name for path in sorted(folder.glob("iter_*"))] == ["iter_0000004"]
    assert (folder / TRACKER).exists()


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
    for number in range(50):
        before = _lines(metrics)
        (life,) = start([*flags, *saving, *(["--async-save"] if number % 2 else [])], 1)
        try:
            wait_for(lambda: _lines(metrics) != before, seconds=120, what="training")  # noqa: B023
            time.sleep(moments.uniform(0.0, 0.3))
            known = max(known, int(tracker.read_text())) if tracker.exists() else known
        finally:
            life.kill()
            (outcome,) = finish([life], seconds=120)
        assert outcome.code == -signal.SIGKILL
        unfinished += any(folder.glob("*.saving"))
        if known:
            with CheckpointReader.open(folder) as reader:
                assert reader.run["iteration"] >= known
                assert reader.folder.name == f"iter_{int(tracker.read_text()):07d}"
    last = str(int(tracker.read_text()) + 5)
    (outcome,) = launch([*flags, *saving, "--exit-interval", last], 1)
    assert outcome.code == 0, outcome.stderr
    assert not list(folder.glob("*.saving"))
    straight = train([*flags, "--exit-interval", last], 1, tmp_path / "straight")
    assert [row["loss"] for row in read_rows(metrics)] == straight.losses
    assert unfinished > 0, "no kill came while a checkpoint was being written"


def _lines(metrics: Path) -> str:
    return metrics.read_text() if metrics.exists() else ""
