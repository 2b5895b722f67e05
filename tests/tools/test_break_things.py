"""Faults at random: the same schedule on every host, and each puts in what falls on its own."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.tools.break_things import Kind, schedule
from tests import preloaded
from tests.distributed.harness import free_port, wait_for

PATIENCE = 120.0
SCRIPT = """
import os, sys, time
with open(sys.argv[1], "a") as log:
    log.write(f"{os.environ['RANK']} {os.environ['TORCHELASTIC_RESTART_COUNT']}" + chr(10))
while not os.path.exists(sys.argv[2]):
    time.sleep(0.1)
"""


@given(
    seed=st.integers(0, 1 << 40),
    kinds=st.lists(st.sampled_from(Kind), min_size=1, unique=True),
    every=st.floats(1.0, 500.0),
    burst=st.floats(0.0, 0.9),
)
def test_a_seed_has_one_schedule_within_its_time(
    seed: int, kinds: list[Kind], every: float, burst: float
) -> None:
    found = schedule(seed, kinds=kinds, every=every, length=1000.0, burst=burst)
    assert found == schedule(seed, kinds=kinds, every=every, length=1000.0, burst=burst)
    times = [one.after for one in found]
    assert times == sorted(times)
    assert all(0 < time < 1000.0 for time in times)
    assert {one.kind for one in found} <= set(kinds)
    assert all(0 <= one.node_of(nodes) < nodes for one in found for nodes in (1, 3, 1024))
    longer = schedule(seed, kinds=kinds, every=every, length=2000.0, burst=burst)
    assert longer[: len(found)] == found


def test_without_bursts_faults_are_as_far_apart_as_asked() -> None:
    found = schedule(1, kinds=[Kind.KILL], every=100.0, length=1e6, burst=0.0)
    times = [0.0, *(one.after for one in found)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert min(gaps) >= 50
    assert max(gaps) <= 150
    assert sum(gaps) / len(gaps) == pytest.approx(100, rel=0.02)


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "hetero", "break-things", *map(str, words)]


def test_ranks_and_nodes_that_it_kills_are_started_again(tmp_path: Path) -> None:
    script, log, done = tmp_path / "script.py", tmp_path / "log", tmp_path / "done"
    script.write_text(SCRIPT)
    words = ["--nproc-per-node", "2", "--nnodes", "1", "--master-port", str(free_port())]
    words += ["--hetero-restarts", "9", str(script), str(log), str(done)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": preloaded.python_path()}
    launcher = subprocess.Popen([sys.executable, "-m", "hetero.run", *words], env=environ)

    def starts() -> list[str]:
        return log.read_text().splitlines() if log.exists() else []

    wait_for(lambda: {"0 0", "1 0"} <= set(starts()), seconds=PATIENCE, what="ranks")
    told = tmp_path / "faults.jsonl"
    breaking = subprocess.Popen(
        command(
            *("--seed", 3, "--every", 4, "--minutes", 0.25, "--burst", 0, "--down", 0.5),
            *("--faults", "kill", "node", "--pid", launcher.pid, "--out", told),
        ),
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    )

    def kinds() -> list[str]:
        lines = told.read_text().splitlines() if told.exists() else []
        return [json.loads(line)["kind"] for line in lines]

    wait_for(lambda: {"kill", "node"} <= set(kinds()), seconds=PATIENCE, what="faults")
    done.touch()
    output, _ = breaking.communicate(timeout=PATIENCE)
    assert breaking.returncode == 0, output
    assert "a launcher that was started again has ended with exit code 0" in output
    assert launcher.wait(PATIENCE) == -9
    assert len(starts()) > 2


def test_bad_flags_are_reported_together(tmp_path: Path) -> None:
    words = ["--seed", 1, "--faults", "rail", "--nnodes", 2, "--pid", os.getpid()]
    done = subprocess.run(command(*words), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--node-rank is -1 of 2 nodes" in done.stderr
    assert "faults of the network need --interfaces" in done.stderr
