"""Goodput: which steps of a job count, over which time, and what rank 0 tells of restarts."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.observe.record import Recorder
from hetero.recover.history import JobHistory, RestartIncident, begin_round, read_attempt
from hetero.recover.node_state import JOB_VARIABLE, STATE_VARIABLE
from megatron.hetero.checkpoint.find_checkpoint import FoundCheckpoint
from megatron.hetero.checkpoint.index import Index, TrainState
from megatron.hetero.goodput import GoodputMeter

LOSS = RestartIncident(
    reason="rank 1 on b was killed",
    at=60.0,
    iteration=50,
    detection_seconds=0.5,
    teardown_seconds=1.0,
    rendezvous_seconds=2.0,
)


def meter(folder: Path | None, *, job: str, rank: int = 0) -> tuple[GoodputMeter, Recorder]:
    """Of a rank that has loaded iteration 40 of the job 'this', which took 30 s."""
    state = TrainState(iteration=40, step_seconds=30.0)
    index = Index(args={}, run={**state.to_record(), "job": "this"}, tensors={}, files={})
    sources: Any = SimpleNamespace(is_new_run=False)
    schedule: Any = None
    recorder = Recorder()
    recorder.rank = rank
    found = GoodputMeter(
        recorder,
        checkpoint=FoundCheckpoint(Path("a folder"), index, sources, schedule),
        start_time=time.monotonic() - 10.0,
        load_seconds=0.25,
        say=lambda line: None,
        environ={JOB_VARIABLE: job, "LOCAL_RANK": str(rank)}
        | ({STATE_VARIABLE: str(folder)} if folder else {}),
    )
    return found, recorder


def test_goodput_counts_the_checkpoint_s_steps_and_all_time_since_the_first_start(
    tmp_path: Path,
) -> None:
    begin_round(tmp_path, JobHistory(elapsed=64.0).with_incident(LOSS))
    own, _ = meter(tmp_path, job="this")
    own.begin_step()
    share = own.end_step(41, seconds=2.0)
    known = own.goodput()
    assert known.kept_seconds == 32.0
    assert 64.0 <= known.wall_seconds < 124.0
    assert share == pytest.approx(32.0 / known.wall_seconds, abs=0.01)
    assert known.repeated_steps == 10


def test_a_checkpoint_of_another_job_brings_no_steps(tmp_path: Path) -> None:
    begin_round(tmp_path, JobHistory())
    own, _ = meter(tmp_path, job="another")
    own.begin_step()
    own.end_step(41, seconds=2.0)
    assert own.goodput().kept_seconds == 2.0


def test_without_a_launcher_that_tells_it_time_begins_with_the_process() -> None:
    own, recorder = meter(None, job="")
    own.begin_step()
    assert own.end_step(41, seconds=2.0) == pytest.approx(0.2, abs=0.1)
    assert recorder.incidents() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_restarts_are_told_and_progress_is_written_once_a_step_has_ended(
    tmp_path: Path, rank: int
) -> None:
    before = time.time()
    begin_round(tmp_path, JobHistory(elapsed=64.0).with_incident(LOSS))
    begun = time.time()
    own, recorder = meter(tmp_path, job="this", rank=rank)
    assert recorder.incidents() == []
    for iteration in (41, 42):
        own.begin_step()
        own.end_step(iteration, seconds=2.0)
    own.close()
    attempt, told = read_attempt(tmp_path), recorder.incidents()
    if rank == 1:
        assert (attempt, told) == (None, [])
        return
    assert attempt is not None
    assert (attempt.resumed_at, attempt.iteration, attempt.load_seconds) == (40, 42, 0.25)
    (incident,) = told
    assert (incident["kind"], incident["text"]) == ("restart", LOSS.reason)
    assert (incident["iteration"], incident["repeated_steps"]) == (50, 10)
    assert incident["seconds"] == pytest.approx(3.5 + 0.25 + incident["start_seconds"])
    # When it was lost: 4 s before the round.
    assert before - 1.0 <= incident["time"] + 4.0 <= begun + 1.0
