"""The history of a job's restarts: what launchers carry from round to round, and ranks add."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hetero.recover.history import (
    KEPT_INCIDENTS,
    Attempt,
    AttemptFile,
    JobHistory,
    RestartIncident,
    begin_round,
    begun_round,
    read_attempt,
)

LOSS = RestartIncident(
    reason="rank 1 on b was killed",
    at=60.0,
    iteration=50,
    detection_seconds=0.5,
    teardown_seconds=1.0,
    rendezvous_seconds=2.0,
)
ATTEMPT = Attempt(
    start_seconds=3.0, load_seconds=0.25, first_step_seconds=0.125, resumed_at=40, iteration=70
)


def test_an_incident_ends_with_what_its_ranks_have_done() -> None:
    history = JobHistory(elapsed=64.0).with_incident(LOSS).completed(ATTEMPT)
    (incident,) = history.incidents
    assert incident.repeated_steps == history.repeated_steps == 10
    assert incident.seconds == history.restart_seconds == 6.75
    assert history.reached(ATTEMPT) == 70


def test_ranks_that_failed_before_they_trained_leave_what_had_been_reached() -> None:
    history = JobHistory().with_incident(LOSS)
    assert history.completed(None) == history
    assert history.reached(None) == 50
    assert JobHistory().reached(None) is None


def test_of_many_restarts_the_last_ones_and_the_sums_are_kept() -> None:
    history = JobHistory()
    for number in range(100):
        history = history.with_incident(replace(LOSS, at=float(number))).completed(ATTEMPT)
    assert [one.at for one in history.incidents] == list(range(100 - KEPT_INCIDENTS, 100))
    assert history.restarts == 100
    assert history.repeated_steps == 1000
    assert history.restart_seconds == pytest.approx(675.0)
    assert JobHistory.from_record(history.to_record()) == history


def test_a_launcher_reads_what_a_dead_rank_wrote_and_forgets_it_in_the_next_round(
    tmp_path: Path,
) -> None:
    history = JobHistory(elapsed=64.0).with_incident(LOSS)
    begin_round(tmp_path, history)
    begun = begun_round(tmp_path)
    assert begun is not None
    assert begun.history == history
    assert begun.formed_at - begun.first_start == pytest.approx(64.0)
    assert read_attempt(tmp_path) is None
    file = AttemptFile(tmp_path)
    for iteration in (9999, 70):
        file.write(replace(ATTEMPT, iteration=iteration))
    assert asdict(read_attempt(tmp_path) or LOSS) == asdict(ATTEMPT)
    file.close()
    begin_round(tmp_path, history)
    assert read_attempt(tmp_path) is None


def test_ranks_whose_launcher_tells_nothing_know_of_no_round(tmp_path: Path) -> None:
    assert begun_round(tmp_path) is None
