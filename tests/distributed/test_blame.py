"""Faults put into real runs: who holds the run up is said on rank 0's console, with the cause."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.faults import tracer
from hetero.tools.runs import SIMULATED
from tests.distributed.harness import (
    MIXED,
    TINY_LLAMA,
    Started,
    changed_entry,
    finish,
    start,
    wait_for,
    wait_for_steps,
)

WARN_AFTER = 2.0
PATIENCE = 90.0
STALL = "if recorder().iteration == 12 and os.environ['RANK'] == '1': "

LOADER = f"""
import os, time
from hetero.observe.record import recorder
from megatron.hetero.data import MicroBatches
following = MicroBatches.__next__
def late(self):
    {STALL}time.sleep(600)
    return following(self)
MicroBatches.__next__ = late
"""
SPINS = f"""
import os, time
from hetero.observe.record import Recorder, recorder
from megatron.hetero import schedule
run = schedule.loss_func
def endless(*args, **more):
    end = time.monotonic() + 600
    while {STALL.removeprefix("if ").removesuffix(": ")} and time.monotonic() < end:
        pass
    return run(*args, **more)
schedule.loss_func = endless
"""
SAVES = """
import os, time
from hetero.observe.record import recorder
from megatron.hetero.checkpoint.checkpointer import Checkpointer
save = Checkpointer.save
def long_save(self, state):
    if state.iteration == 12 and os.environ["RANK"] == "1":
        time.sleep(600)
    save(self, state)
Checkpointer.save = long_save
"""
HANGS_IN_GLOO = f"""
import os, time
import torch.distributed as dist
from hetero.observe.record import recorder
from megatron.hetero import optimizer
gather = optimizer.RankStatistics.gather_rows
def missed(self, *args, **more):
    {STALL}time.sleep(600)
    return gather(self, *args, **more)
optimizer.RankStatistics.gather_rows = missed
"""
TWO_SENDS = """
import os
import torch
from hetero.collectives.process_group import HeteroProcessGroup
from hetero.observe.record import recorder
reduce = HeteroProcessGroup._all_reduce
def sends(self, *given):
    if recorder().iteration == 12:
        self.send([torch.ones(16 << 20)], 1 - int(os.environ["RANK"]), 0).wait()
    return reduce(self, *given)
HeteroProcessGroup._all_reduce = sends
"""


def blamed(
    corpus,
    folder: Path,
    fault: str = "",
    *,
    act=lambda processes: None,
    flags: Sequence[str] = MIXED,
    ranks: Sequence[int] = (1,),
    warnings: int = 3,
) -> str:
    """A warning of a run of two ranks, of which these have a fault, before it is ended.

    `act` is called once training goes on. Silence, and where a long phase is, show only after some
    seconds: in a later warning than the first.
    """
    metrics = folder / "metrics.jsonl"
    words = [*TINY_LLAMA, *corpus.flags, *flags, "--train-iters", "100000"]
    words += ["--lr-decay-iters", "1000", "--hetero-stall-warning", str(WARN_AFTER)]
    words += ["--hetero-flight-recorder", str(folder / "dumps"), "--metrics-file", str(metrics)]
    scripts = {1: changed_entry(folder, fault)} if fault else {}
    # What rank 0 says is read while it runs, and whether it has a record of each rank's steps.
    said, known = folder / "said", folder / "known"
    tell = f"""
import json
import hetero.observe.watch as watch
look, warn = watch.StallWatch._look, watch.StallWatch._warn
def looked(self):
    look(self)
    found = [one.snapshot.iteration for one in self._collector.seen().values()]
    if len(found) == 2 and min(found) > 4:
        open({str(known)!r}, "w").close()
def told(self, still):
    warn(self, still)
    with open({str(said)!r}, "a") as file:
        stalls = [i for i in self._collector.incidents() if i["kind"] == "stall"]
        file.write(json.dumps(stalls[-1]) + "\\n")
watch.StallWatch._look, watch.StallWatch._warn = looked, told
"""
    scripts[0] = changed_entry(folder, fault * (0 in ranks) + tell, name="rank_0.py")
    processes = start(words, 2, environ=SIMULATED, scripts=scripts)
    try:
        wait_for_steps(metrics, 8)
        wait_for(known.exists, seconds=PATIENCE, what="a record of each rank")
        act(processes)
        wait_for(
            lambda: said.exists() and said.read_text().count("\n") >= warnings,
            seconds=PATIENCE,
            what="a warning",
        )
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
        finish(processes, seconds=30)
    incident = json.loads(said.read_text().splitlines()[-1])
    assert incident["ranks"] == list(ranks), json.dumps(incident)
    return f"{incident['causes'][0]}: {incident['text']}"


def test_a_rank_that_stays_in_its_loader_is_named_with_the_line(corpus, tmp_path: Path) -> None:
    text = blamed(corpus, tmp_path, LOADER)
    assert text.startswith("data: rank 0 on ")
    assert "(stage 1, nvidia), which has been in its data loader for " in text
    assert "changed.py:7 in late" in text


def test_a_rank_that_spins_on_one_core_is_named(corpus, tmp_path: Path) -> None:
    text = blamed(corpus, tmp_path, SPINS)
    # Whether all of a core is its own depends on what else the host does.
    assert text.startswith(("compute: ", "busy: "))
    assert "in phase 'forward'" in text
    assert "in endless" in text


def test_a_long_save_is_told_as_what_it_is(corpus, tmp_path: Path) -> None:
    folder = [*MIXED, "--save", str(tmp_path / "checkpoints"), "--save-interval", "12"]
    text = blamed(corpus, tmp_path, SAVES, flags=folder)
    assert text.startswith("save: ")
    assert "has been saving a checkpoint for " in text


def test_a_rank_that_does_not_make_a_call_of_the_library_is_named(corpus, tmp_path: Path) -> None:
    text = blamed(corpus, tmp_path, HANGS_IN_GLOO)
    assert "in missed" in text


def test_a_stopped_rank_is_told_from_one_that_hangs(corpus, tmp_path: Path) -> None:
    def stop(processes: list[Started]) -> None:
        processes[1].send_signal(signal.SIGSTOP)

    text = blamed(corpus, tmp_path, act=stop, warnings=2)
    assert text.startswith("stopped: ")
    assert "got SIGSTOP; continue it with kill -CONT" in text


def test_a_rank_in_a_debugger_is_told_with_the_debuggers_process(corpus, tmp_path: Path) -> None:
    with ExitStack() as stack:

        def attach(processes: list[Started]) -> None:
            words = tracer.command(processes[1].pid)
            debugger = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE))
            stack.callback(debugger.kill)
            assert debugger.stdout is not None
            assert debugger.stdout.readline() == b"attached\n"

        text = blamed(corpus, tmp_path, act=attach, warnings=2)
    assert text.startswith("debugged: ")
    assert "(stage 1, nvidia), which is held by a debugger: process " in text


def test_two_ranks_that_both_send_first_are_named_as_waiting_for_each_other(
    corpus, tmp_path: Path
) -> None:
    flags = ["--hetero-data-parallel", "amd:1,nvidia:1"]
    text = blamed(corpus, tmp_path, TWO_SENDS, flags=flags, ranks=(0, 1), warnings=1)
    assert text.startswith("cycle: these ranks wait for each other: rank 0 on ")
    assert " s for send to rank 0 on " in text
