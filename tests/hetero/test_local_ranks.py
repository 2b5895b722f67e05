"""Ranks of this host that end before they join, known from the environment of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from hetero.liveness import local_ranks
from hetero.liveness.local_ranks import LocalRanks

JOB = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "3"}
Ranks = dict[int, subprocess.Popen[bytes]]


def start(rank: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env={**os.environ, **JOB, "RANK": str(rank)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(local_ranks, "_LOOK_SECONDS", 0.0)
    started = {rank: start(rank) for rank in (1, 2)}
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


def of_job(**variables: str) -> Mapping[str, str]:
    return {**JOB, **variables}


@pytest.mark.parametrize("reaped", [True, False])
def test_a_rank_that_was_seen_and_is_gone_has_ended(ranks: Ranks, reaped: bool) -> None:
    local = LocalRanks(of_job())
    assert local.ended([0, 1, 2]) == {}
    ranks[1].kill()
    if reaped:
        ranks[1].wait()
    else:
        os.waitid(os.P_PID, ranks[1].pid, os.WEXITED | os.WNOWAIT)
    assert local.ended([0, 1, 2]) == {1: ranks[1].pid}
    assert local.ended([0, 2]) == {}


def test_a_rank_whose_process_a_wrapper_started_again_has_not_ended(ranks: Ranks) -> None:
    local = LocalRanks(of_job())
    local.look()
    ranks[1].kill()
    ranks[1].communicate()
    ranks[1] = start(1)
    assert local.ended([1]) == {}


@pytest.mark.parametrize("variable", ["MASTER_PORT", "SLURM_STEP_ID"])
def test_ranks_of_another_job_do_not_count(ranks: Ranks, variable: str) -> None:
    local = LocalRanks(of_job(**{variable: "7"}))
    local.look()
    ranks[1].kill()
    ranks[1].wait()
    assert local.ended([1]) == {}


def test_the_sentence_names_rank_host_and_process() -> None:
    assert local_ranks.ended_early({3: 17}) == (
        f"rank 3 on {os.uname().nodename} (pid 17) ended before it joined the others; see its log"
    )
