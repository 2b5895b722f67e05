"""What a process does for the one that started it: it ends with it, and says why it ends."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hetero.collectives.work import CollectiveError, CollectiveWork
from hetero.launch.exits import ProcessExit, exit_of, find_cause
from hetero.startup import process
from hetero.startup.process import NAMES, PREFIX, call_in_children, unknown_variables
from tests.commands import ROOT

CHILD = """
import signal, time
from hetero.startup.process import end_with_parent
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
    monkeypatch.setattr(process, "end_with_parent", lambda number: None)
    monkeypatch.setattr(sys, "excepthook", lambda *of_the_error: None)
    monkeypatch.setenv(process.LAUNCHER_VARIABLE, str(os.getppid()))
    process.serve_launcher()

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


class Inherited:
    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def note(self) -> None:
        os.write(self._pipe, b"called")


def test_a_child_calls_what_lives_and_nothing_is_kept_of_what_does_not() -> None:
    """A process may open and close any number of links."""
    reading, writing = os.pipe()
    inherited = [Inherited(writing) for _ in range(3)]
    for one in inherited:
        call_in_children(one, Inherited.note)
    gone = weakref.ref(inherited.pop())
    del one
    gc.collect()
    assert gone() is None
    assert sum(isinstance(one, Inherited) for one in process._functions()) == 2
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        assert said.read() == 2 * b"called"


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        (dict.fromkeys(NAMES, "nccl"), []),
        ({"HETERO_TEST_OUT": "x", "OTHER": "y", "HETERO_INSTEAD_OF": "nccl, gloo"}, []),
        ({"HETERO_VENDER": "amd"}, ["HETERO_VENDER is no variable .*did you mean HETERO_VENDOR"]),
        ({"HETERO_XYZ": ""}, ["HETERO_XYZ is no variable of this project; there are HETERO_VEND"]),
        (
            {"HETERO_INSTEADOF": "gloo", "HETERO_INSTEAD_OF": "nccl,glo"},
            ["did you mean HETERO_INSTEAD_OF", "names glo, which .*did you mean gloo"],
        ),
    ],
)
def test_a_name_that_nothing_reads_is_told_with_the_nearest(
    environ: dict[str, str], told: list[str]
) -> None:
    found = list(unknown_variables(environ))
    assert len(found) == len(told)
    assert all(re.search(pattern, line) for pattern, line in zip(told, found, strict=True))


def test_every_variable_that_the_program_reads_is_known() -> None:
    """By its name in quotes, in Python and in C."""
    read: set[str] = set()
    for folder in ("hetero", "megatron", "bench"):
        for file in (ROOT / folder).rglob("*.[pc]*"):
            if file.suffix in (".py", ".c"):
                read |= set(re.findall(rf'"({PREFIX}[A-Z_]+)"', file.read_text()))
    assert {name for name in read if not name.startswith("HETERO_TEST_")} == set(NAMES)
