"""The flight recorder in training: dumps of a rank that does not come, and of one that ends."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from pathlib import Path

from hetero.tools.runs import SIMULATED
from tests.distributed.harness import (
    MIXED,
    TINY_LLAMA,
    changed_entry,
    finish,
    launch,
    start,
    wait_for_steps,
)

COMES_LATE = """
import os, time
from hetero.observe.record import Recorder
begin = Recorder.begin_iteration
def begin_late(self, iteration):
    begin(self, iteration)
    if iteration == 3:
        while not all(map(os.path.exists, {files})):
            time.sleep(0.05)
        time.sleep(2)  # what comes to a third a second later is dumped again
Recorder.begin_iteration = begin_late
"""
"""Once there are these files."""


def test_a_rank_that_does_not_come_has_all_ranks_dump_at_a_third_of_the_timeout(
    corpus, tmp_path: Path
) -> None:
    folder = tmp_path / "dumps"
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--hetero-flight-recorder", str(folder)]
    flags += ["--hetero-timeout", "15"]
    dumps = [str(folder / f"rank{rank}.txt") for rank in (0, 1)]
    script = changed_entry(tmp_path, COMES_LATE.format(files=dumps))
    outcomes = launch(flags, 2, environ=SIMULATED, scripts={1: script})
    # It came long before the timeout.
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[1].stderr
    assert f"the last calls are in {folder}" in outcomes[0].stderr
    waiting, sleeping = (Path(name).read_text() for name in dumps)
    assert "s of its timeout of 15 s" in waiting
    assert "phase: wait next for " in waiting
    assert "why: rank 0 wrote a dump" in sleeping
    assert f"{script}:" in sleeping
    assert "in begin_late" in sleeping
    said = subprocess.run(
        [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stderr
    assert "Not all ranks joining collective" in said
    assert "group info: activations 0->1:activations" in said
    assert "missing ranks: {1}" in said
    assert "has errors" not in said


def test_a_rank_that_is_killed_has_the_other_dump_before_it_reports(corpus, tmp_path: Path) -> None:
    folder, metrics = tmp_path / "dumps", tmp_path / "metrics.jsonl"
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--hetero-flight-recorder", str(folder)]
    flags += ["--train-iters", "100000", "--lr-decay-iters", "1000", "--metrics-file", str(metrics)]
    processes = start(flags, 2, environ=SIMULATED)
    wait_for_steps(metrics, 2)
    processes[1].send_signal(signal.SIGKILL)
    outcome = finish(processes, seconds=120)[0]
    assert outcome.code == 1
    dumped = outcome.stderr.index(f"the last calls are in {folder}")
    assert dumped < outcome.stderr.index("error: "), outcome.stderr
    calls = pickle.loads((folder / "rank_0").read_bytes())
    assert "rank 1" in calls["reason"]
    # Inside the library, across vendors, and over the link of the pipeline.
    groups = {name for call in calls["entries"] for name in call["process_group"][:1]}
    assert {"hetero model 0", "activations 0->1", "gradients 1->0"} <= groups
