"""Rank 0's collection: the last record of each rank, and every incident once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from hetero.observe.collect import Collector
from hetero.observe.record import Recorder


def rank(number: int) -> Recorder:
    made = Recorder()
    made.rank = number
    return made


def texts(incidents: list[Mapping[str, Any]]) -> list[str]:
    return [incident["text"] for incident in incidents]


def test_each_rank_is_seen_as_it_was_last_with_the_age_of_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    own, other = rank(0), rank(1)
    collector = Collector(own)
    for iteration in (1, 2):
        other.begin_iteration(iteration)
        collector.add(1, other.snapshot().to_json())
    own.begin_iteration(3)
    now = 104.0
    seen = collector.seen()
    assert {number: one.snapshot.iteration for number, one in seen.items()} == {0: 3, 1: 2}
    assert {number: one.age for number, one in seen.items()} == {0: 0.0, 1: 4.0}


def test_incidents_of_all_ranks_are_kept_in_the_order_of_their_arrival() -> None:
    own, other = rank(0), rank(1)
    collector = Collector(own)
    other.add_incident("rail lost", "rail 1")
    collector.add(1, other.snapshot().to_json())
    own.add_incident("skipped", "iteration 7")
    assert texts(collector.incidents()) == ["rail 1", "iteration 7"]
    other.add_incident("rail lost", "rail 2")
    collector.add(1, other.snapshot().to_json())
    assert texts(collector.incidents()) == ["rail 1", "iteration 7", "rail 2"]


def test_an_incident_that_comes_twice_is_kept_once() -> None:
    """By a heartbeat, and again with the last ones of a rank at the end of the run."""
    own, other = rank(0), rank(1)
    collector = Collector(own)
    own.add_incident("skipped", "iteration 7")
    other.add_incident("rail lost", "rail 1")
    collector.seen()
    collector.add(1, other.snapshot().to_json())
    other.add_incident("rail lost", "rail 2")
    collector.add_incidents(other.incidents())
    collector.add_incidents(own.incidents())
    assert texts(collector.incidents()) == ["iteration 7", "rail 1", "rail 2"]


def test_equal_incidents_of_two_ranks_are_two() -> None:
    collector = Collector(rank(0))
    for number in (1, 2):
        other = rank(number)
        other.add_incident("rail lost", "rail 1")
        collector.add(number, other.snapshot().to_json())
    assert [incident["rank"] for incident in collector.incidents()] == [1, 2]


def test_listeners_hear_of_each_incident_once() -> None:
    own, other = rank(0), rank(1)
    collector = Collector(own)
    heard: list[Mapping[str, Any]] = []
    collector.on_incident(heard.append)
    other.add_incident("rail lost", "rail 1")
    own.add_incident("skipped", "iteration 7")
    collector.add(1, other.snapshot().to_json())
    collector.seen()
    collector.incidents()
    assert texts(heard) == ["rail 1", "iteration 7"]


def test_the_last_thousand_are_kept() -> None:
    collector = Collector(rank(0))
    other = rank(1)
    for count in range(1500):
        other.add_incident("skipped", f"iteration {count}")
        collector.add(1, other.snapshot().to_json())
    assert texts(collector.incidents()) == [f"iteration {count}" for count in range(500, 1500)]


def test_a_record_of_another_version_is_an_error_of_the_caller() -> None:
    collector = Collector(rank(0))
    collector.add(1, b'{"rank":1,"incidents":[]}')
    with pytest.raises(ValueError, match="a record that this version does not know"):
        collector.seen()
