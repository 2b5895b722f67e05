"""What happens when a rank dies while the others train, and at the end of a run."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import psutil
import pytest

from hetero.tools.runs import SIMULATED
from tests.distributed.harness import (
    MIXED,
    TINY_LLAMA,
    Started,
    changed_entry,
    finish,
    launch_well,
    start,
    wait_for_steps,
)

STALLED = Path(__file__).with_name("faulty_training.py")
FAULTY = """
import os, signal, sys
import hetero.startup.liveness as liveness
import megatron.hetero.checkpoint.saver as saver
import megatron.hetero.initialize as initialize
liveness._HEARTBEAT_SECONDS = liveness._GRACE_SECONDS = 0.5
if os.environ["RANK"] == "{victim}":
    {function} = lambda *_, **__: os.kill(os.getpid(), signal.{sent})
"""

SIGNALLED = """
import os, signal
import megatron.hetero.initialize as initialize
from hetero.errors import HeteroError
from megatron.hetero.trainer import Trainer

def fails(*_):
    raise HeteroError("the step failed")

def print_interrupted(text, prints=initialize.print_error):
    os.kill(os.getpid(), signal.SIGTERM)
    prints(text)

Trainer.train_step = fails
initialize.print_error = print_interrupted
"""


def start_faulty(
    corpus, folder: Path, victim: int, function: str, sent: str, *more: str
) -> list[Started]:
    """Two ranks, of which one is sent a signal in a function; the other does not wait for long."""
    fault = FAULTY.format(victim=victim, function=function, sent=sent)
    script = changed_entry(folder, fault)
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, *more]
    return start(flags, 2, environ=SIMULATED, scripts={0: script, 1: script})


@pytest.mark.parametrize(
    ("victim", "transport", "sent", "fate"),
    [
        (1, "gloo", signal.SIGKILL, "exited without reporting an error (last heard at "),
        (0, "shm", signal.SIGKILL, "exited without reporting an error (last heard at "),
        (1, "tcp", signal.SIGKILL, "exited without reporting an error (last heard at "),
        (0, "tcp", signal.SIGINT, "failed: ended by SIGINT"),
        (1, "shm", signal.SIGTERM, "failed: ended by SIGTERM"),
    ],
)
def test_a_rank_that_a_signal_ends_ends_the_others_within_seconds(
    corpus, tmp_path: Path, victim: int, transport: str, sent: signal.Signals, fate: str
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--train-iters", "100000"]
    flags += ["--hetero-transport", transport]
    processes = start([*flags, "--metrics-file", str(metrics)], 2, environ=SIMULATED)
    wait_for_steps(metrics, 3)
    processes[victim].send_signal(sent)
    outcomes = finish(processes, seconds=120)

    survivor = 1 - victim
    assert outcomes[victim].code == (-sent if sent == signal.SIGKILL else 128 + sent)
    assert outcomes[survivor].code == 1
    assert f"rank {survivor}" in outcomes[survivor].stderr
    named = f"rank {victim} on {socket.gethostname()} (stage {victim})"
    assert f"{named} {fate}" in outcomes[survivor].stderr
    assert "Traceback" not in outcomes[survivor].stderr


def test_a_signal_while_a_rank_reports_its_failure_does_not_replace_it(
    corpus, tmp_path: Path
) -> None:
    """A launcher sends one to the others as soon as any rank has failed."""
    script = changed_entry(tmp_path, SIGNALLED)
    [outcome] = finish(start([*TINY_LLAMA, *corpus.flags], 1, scripts={0: script}), seconds=120)
    assert outcome.code == 1
    assert outcome.stderr.splitlines()[-1] == "error: the step failed"
    assert "Traceback" not in outcome.stderr


HELD_CLOSE = """
import os, time
from megatron.hetero.trainer import Trainer
close, step = Trainer.close, Trainer.train_step

def close_once_told(self):
    while not os.path.exists({until!r}):
        time.sleep(0.02)
    close(self)

def fails(self, batches):
    if self.iteration == 2:
        raise ValueError("out of luck")
    step(self, batches)

Trainer.close, Trainer.train_step = close_once_told, fails
"""


def test_the_others_are_told_of_a_failure_before_outputs_are_closed(corpus, tmp_path: Path) -> None:
    """As a service to which metrics are sent may take minutes to answer."""
    until = tmp_path / "close"
    script = changed_entry(tmp_path, HELD_CLOSE.format(until=str(until)))
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED]
    processes = start(flags, 2, environ=SIMULATED, scripts={1: script})
    try:
        code = processes[0].wait(timeout=120)
        message = processes[0].stderr.read()  # type: ignore[union-attr]
    finally:
        until.touch()
        failed = finish(processes[1:], seconds=60)[0]
    assert code == 1
    assert "rank 1 on" in message
    assert "failed: ValueError: out of luck" in message
    assert failed.code == 1
    assert failed.stderr.count("ValueError: out of luck") == 1


SLOW_CLOSE = """
import time
from megatron.hetero import pretrain
from megatron.hetero.trainer import Trainer
pretrain._CLOSE_SECONDS = 600.0
Trainer.close = lambda self: time.sleep(600)
"""


def test_a_rank_that_another_took_along_does_not_wait_for_its_outputs(
    corpus, tmp_path: Path
) -> None:
    """They may wait for the other, as for a GPU's stream."""
    metrics = tmp_path / "metrics.jsonl"
    script = changed_entry(tmp_path, SLOW_CLOSE)
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--train-iters", "100000"]
    flags += ["--metrics-file", str(metrics)]
    processes = start(flags, 2, environ=SIMULATED, scripts={0: script})
    wait_for_steps(metrics, 2)
    processes[1].kill()
    assert finish(processes, seconds=120)[0].code == 1


def test_data_workers_end_with_their_rank(corpus, tmp_path: Path) -> None:
    """They hold copies of the sockets that tell others of its end, and may be blocked."""
    metrics = tmp_path / "metrics.jsonl"
    flags = [*TINY_LLAMA, *corpus.flags, "--train-iters", "100000", "--num-workers", "1"]
    processes = start([*flags, "--metrics-file", str(metrics)], 1)
    wait_for_steps(metrics, 1)
    rank = psutil.Process(processes[0].pid)
    workers = rank.children(recursive=True)
    for worker in workers:
        worker.suspend()
    rank.kill()
    finish(processes, seconds=60)
    gone, alive = psutil.wait_procs(workers, timeout=60)
    for worker in alive:
        worker.kill()
    assert gone
    assert not alive


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_a_peer_that_stops_answering_is_an_error_after_the_timeout(
    corpus, tmp_path: Path, transport: str
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--train-iters", "100000"]
    flags += ["--hetero-transport", transport, "--hetero-timeout", "3"]
    flags += ["--metrics-file", str(metrics)]
    processes = start(flags, 2, environ=SIMULATED)
    wait_for_steps(metrics, 3)
    processes[0].send_signal(signal.SIGSTOP)
    try:
        code = processes[1].wait(timeout=120)
        message = processes[1].stderr.read()  # type: ignore[union-attr]
    finally:
        processes[0].send_signal(signal.SIGCONT)
        finish(processes, seconds=60)

    # Where the survivor happens to wait: for a tensor of the stopped rank, or in a collective,
    # of gloo's or across vendors. Where that ends later, liveness does it.
    on_the_link = f"link rank 1 (stage 1) - rank 0 (stage 0) over {transport}" in message
    in_a_group = "of group hetero embedding 0" in message and "rank 1 - rank 0" in message
    assert code == 1
    names_deadline = re.search(r"(within|for) 3 s\b", message) is not None
    of_gloo = "it took too long" in message
    silent = f"rank 0 on {socket.gethostname()} (stage 0) failed: no heartbeat for" in message
    assert (on_the_link and names_deadline) or in_a_group or of_gloo or silent
    assert "Traceback" not in message


def test_data_that_stall_are_told_of_before_the_others_give_up(corpus) -> None:
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--train-iters", "100000"]
    # The loader has nine tenths of it.
    flags += ["--num-workers", "2", "--hetero-timeout", "20"]
    environ = {**SIMULATED, "FAULT": "data of rank 0 stalled"}
    # A worker left behind would hold the pipes, and the end of this.
    outcomes = finish(start(flags, 2, scripts={0: STALLED}, environ=environ), seconds=120)

    said = "rank 0: no batch came from the loader's workers for 18 s; see whether the data's file"
    assert [outcome.code for outcome in outcomes] == [1, 1]
    assert said in outcomes[0].stderr
    assert "rank 0" in outcomes[1].stderr
    assert "no batch came from the loader's workers" in outcomes[1].stderr


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_stopped_in_a_save_is_named_after_the_timeout(
    corpus, tmp_path: Path, victim: int
) -> None:
    saving = ["--save", str(tmp_path / "saved"), "--save-interval", "1", "--hetero-timeout", "3"]
    processes = start_faulty(corpus, tmp_path, victim, "saver.Saver._advance", "SIGSTOP", *saving)
    try:
        code = processes[1 - victim].wait(timeout=120)
        message = processes[1 - victim].stderr.read()  # type: ignore[union-attr]
    finally:
        processes[victim].send_signal(signal.SIGKILL)
        finish(processes, seconds=60)
    assert code == 1
    assert f"rank {victim} on {socket.gethostname()} (stage {victim}) failed: no heart" in message
    assert "Traceback" not in message


@pytest.mark.parametrize(("victim", "step"), [(0, "build_groups"), (1, "find_checkpoint")])
def test_a_rank_killed_while_they_agree_or_build_groups_is_named_by_the_others(
    corpus, tmp_path: Path, victim: int, step: str
) -> None:
    processes = start_faulty(corpus, tmp_path, victim, f"initialize.{step}", "SIGKILL")
    outcomes = finish(processes, seconds=120)
    assert outcomes[victim].code == -signal.SIGKILL
    assert outcomes[1 - victim].code == 1
    last = outcomes[1 - victim].stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert f"rank {victim} on {os.uname().nodename}" in last
    assert "Traceback" not in outcomes[1 - victim].stderr


def test_data_workers_have_ended_before_a_rank_destroys_its_groups(tmp_path: Path) -> None:
    """They hold copies of gloo's sockets, and gloo may abort another rank for it."""
    before = (
        "from multiprocessing import active_children\n"
        "from megatron.hetero.job import Job\n"
        "close = Job.close\n"
        "def closing(job):\n"
        "    print('workers left:', sum(child.is_alive() for child in active_children()))\n"
        "    close(job)\n"
        "Job.close = closing\n"
    )
    script = changed_entry(tmp_path, before)
    flags = [*TINY_LLAMA, "--mock-data", "--num-workers", "2", "--eval-iters", "1"]
    flags += "--tokenizer-type NullTokenizer --vocab-size 96".split()
    (said,) = launch_well(flags, 1, scripts={0: script})
    assert "workers left: 0" in said
