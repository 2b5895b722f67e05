"""Signals that reach a run's processes: it saves, or ends and says what keeps it from saving."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from hetero.tools.runs import SIMULATED
from megatron.hetero.checkpoint.folder import TRACKER
from tests import preloaded
from tests.distributed.harness import (
    ENTRY,
    MIXED,
    TINY_LLAMA,
    Started,
    changed_entry,
    finish,
    free_port,
    start,
    wait_for,
    wait_for_steps,
)
from tests.sentences import without_time

HOST = socket.gethostname()
EVALUATES = "--eval-interval 2 --eval-iters 2000 --train-iters 4".split()


def start_pair(corpus, folder: Path, *more: str) -> list[Started]:
    """A pipeline over two vendors that saves by signals, in its third step or evaluation."""
    metrics = folder / "metrics.jsonl"
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--train-iters", "100000"]
    flags += ["--lr-decay-iters", "1000", "--save", str(folder / "saved")]
    flags += ["--exit-signal-handler", "--metrics-file", str(metrics), *more]
    processes = start(flags, 2, environ=SIMULATED)
    wait_for_steps(metrics, 2)
    return processes


def with_descendants(processes: list[Started]) -> list[psutil.Process]:
    roots = [psutil.Process(process.pid) for process in processes]
    return [each for root in roots for each in (root, *root.children(recursive=True))]


@pytest.mark.parametrize(
    ("sent", "to_all", "more"),
    [
        ("SIGTERM", True, ["--num-workers", "2", "--exit-signal-handler-for-dataloader"]),
        ("SIGUSR1", True, ["--num-workers", "1", "--exit-signal", "SIGUSR1"]),
        ("SIGHUP", False, ["--num-workers", "1", "--save-interval", "1"]),
        ("SIGINT", False, ["--num-workers", "1", *EVALUATES]),
    ],
    ids=["all", "chosen", "one, during saves", "one, in an evaluation"],
)
def test_a_signal_saves_whichever_processes_it_reaches(
    corpus, tmp_path: Path, sent: str, to_all: bool, more: list[str]
) -> None:
    processes = start_pair(corpus, tmp_path, *more)
    reached = with_descendants(processes) if to_all else [processes[1]]
    for process in reached:
        process.send_signal(signal.Signals[sent])
    outcomes = finish(processes, seconds=240)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].stderr
    last = int((tmp_path / "saved" / TRACKER).read_text())
    assert f"stopping at iteration {last}, as {sent} asks" in outcomes[0].stdout
    if "--eval-interval" in more:
        assert f"of 2000 batches, as {sent} asks" in outcomes[0].stdout


def test_a_signal_beside_a_rank_that_hangs_ends_the_run_and_names_it(
    corpus, tmp_path: Path
) -> None:
    processes = start_pair(corpus, tmp_path, "--num-workers", "0", "--hetero-timeout", "600")
    processes[0].send_signal(signal.SIGSTOP)
    processes[1].send_signal(signal.SIGTERM)
    try:
        assert processes[1].wait(timeout=240) == 128 + signal.SIGTERM
        message = processes[1].stderr.read()  # type: ignore[union-attr]
    finally:
        processes[0].send_signal(signal.SIGKILL)
        finish(processes, seconds=60)
    assert f"ended by SIGTERM; nothing was saved, because rank 0 on {HOST}" in message
    assert "Traceback" not in message


IN_A_LIBRARY = """
import hashlib, os
from megatron.hetero.trainer import Trainer
step = Trainer.train_step

def computes(self, batches):
    if self.iteration == 2:
        open({ready!r}, "w").close()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)
    step(self, batches)

Trainer.train_step = computes
"""


def test_a_signal_to_all_ends_a_rank_inside_a_library_with_the_same_exit_code(
    corpus, tmp_path: Path
) -> None:
    """Its main thread cannot be interrupted, and another that is has told it of its end."""
    ready = tmp_path / "ready"
    script = changed_entry(tmp_path, IN_A_LIBRARY.format(ready=str(ready)))
    processes = start(
        [*TINY_LLAMA, *corpus.flags, *MIXED], 2, environ=SIMULATED, scripts={1: script}
    )
    wait_for(ready.exists, seconds=120, what="the library's call")
    for process in processes:
        process.send_signal(signal.SIGTERM)
    assert [one.code for one in finish(processes, seconds=120)] == [143, 143]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_ends_before_it_joins_is_named_at_once(victim: int) -> None:
    """Without a launcher that sees it end. The others would wait for ten minutes."""
    flags = [*TINY_LLAMA, *MIXED, "--mock-data", "--tokenizer-type", "ByteLevelTokenizer"]
    port = free_port()

    def environ(rank: int) -> Mapping[str, str]:
        shared = {**os.environ, **SIMULATED, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared["PYTHONPATH"] = preloaded.python_path()
        return shared | {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}

    # No fork, whose environment cannot be seen from outside. The other says whom it waits for, as
    # the first of its node does.
    stays = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=environ(victim)
    )
    waits = preloaded.start(ENTRY, flags, environ=environ(1 - victim))
    try:
        assert waits.stderr is not None
        # Builds of PyTorch for CUDA warn first where there is no GPU.
        lines = iter(waits.stderr.readline, "")
        assert any(without_time(line).startswith(f"waiting for rank {victim} ") for line in lines)
        stays.kill()
        assert waits.wait(timeout=120) == 1
        said = f"rank {victim} on {HOST} (pid {stays.pid}) ended before it joined"
        assert said in waits.stderr.read()
    finally:
        for process in (stays, waits):
            process.kill()
            process.communicate()
