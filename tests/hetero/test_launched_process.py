"""What a process does for the one that started it: it ends with it, and says why it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hetero import launched_process
from hetero.collectives.failure_report import CollectiveError
from hetero.collectives.work import CollectiveWork
from hetero.launch.exits import ProcessExit, exit_of, find_cause

CHILD = """
import signal, time
from hetero.launched_process import end_with_parent
end_with_parent(signal.SIGTERM)
print("ready", flush=True)
time.sleep(120)
"""
RANK_OF_A_LAUNCHER = """
import torch, time
print("ready", flush=True)
time.sleep(120)
"""
PARENT = """
import os, subprocess, sys, time
os.environ["HETERO_LAUNCHER_PID"] = str(os.getpid())
subprocess.Popen([sys.executable, "-c", {child!r}])
time.sleep(120)
"""


@pytest.mark.parametrize("child", [CHILD, RANK_OF_A_LAUNCHER], ids=["any", "rank"])
def test_a_process_whose_parent_is_killed_ends_too(child: str) -> None:
    words = [sys.executable, "-c", PARENT.format(child=child)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.kill()
        assert parent.stdout.read() == b"", "it ends where the child, which has it open too, has"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the launcher reads of a rank that an exception has ended."""
    monkeypatch.setattr(launched_process, "end_with_parent", lambda number: None)
    monkeypatch.setattr(sys, "excepthook", lambda *of_the_error: None)
    monkeypatch.setenv(launched_process.LAUNCHER_VARIABLE, str(os.getppid()))
    launched_process.serve_launcher()

    def read(rank: int, error: Exception) -> ProcessExit:
        file = tmp_path / f"{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        sys.excepthook(type(error), error, None)
        failure = ProcessFailure(local_rank=rank, pid=1, exitcode=1, error_file=str(file))
        return exit_of(rank, "a", failure)

    return read


def test_what_a_group_says_in_a_future_is_told_as_its_own_words_and_as_no_cause(told) -> None:
    """As DDP's backward raises it, when a rank fails and destroys its groups."""
    work = CollectiveWork("all_reduce", [torch.ones(1)], timeout=1.0, group="0")
    work.finish(CollectiveError("all_reduce failed on rank 1 on a: rank 2 on a has left the group"))
    with pytest.raises(RuntimeError) as raised:
        work.get_future().then(lambda future: future.value()).wait()
    consequence, cause = told(1, raised.value), told(2, KeyError("a bug"))
    assert consequence.sentence() == (
        "all_reduce failed on rank 1 on a: rank 2 on a has left the group"
    )
    assert find_cause([consequence, cause]) == cause
