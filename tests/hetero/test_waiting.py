"""What is said of a wait, when, and how those who are missing are named."""

from __future__ import annotations

import pytest

from hetero.waiting import Intervals, Waiting, name_ranks, spans


def test_a_wait_is_spoken_of_after_its_first_interval_and_then_at_each_further() -> None:
    now, said = [0.0], []
    waiting = Waiting(Intervals(first=10, again=30), clock=lambda: now[0], say=said.append)
    for now[0] in range(0, 100, 2):
        waiting.tell("rank 1")
    assert said == [f"waiting for rank 1, {s} s so far" for s in (10, 30, 60, 90)]


def test_who_is_waited_for_is_asked_only_when_it_is_due_and_may_be_nobody() -> None:
    now, said = [0.0], []
    waiting = Waiting(Intervals(first=1, again=1), clock=lambda: now[0], say=said.append)
    waiting.tell(lambda: pytest.fail("it is not due"))
    now[0] = 5.0
    waiting.tell(lambda: None)
    assert said == []


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "rank 3"), ([0, 1, 2, 3, 8], "ranks 0-3, 8"), ([9, 1], "ranks 1, 9")],
)
def test_numbers_are_written_compactly(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text


@pytest.mark.parametrize(
    ("ranks", "local", "nodes", "text"),
    [
        (range(8, 16), "8", "2", "ranks 8-15 (node 1 of 2)"),
        (range(8, 32), "8", "4", "ranks 8-31 (nodes 1-3 of 4)"),
        ([1], "1", "2", "rank 1 (node 1 of 2)"),
        ([1], "2", "1", "rank 1"),
        ([2], "2", "2", "rank 2"),  # three ranks on two nodes: whose it is cannot be told
        ([1], "", "", "rank 1"),
    ],
)
def test_ranks_are_named_with_their_nodes_where_that_is_known(
    ranks: list[int], local: str, nodes: str, text: str
) -> None:
    environ = {"LOCAL_WORLD_SIZE": local, "GROUP_WORLD_SIZE": nodes}
    world = {("8", "2"): 16, ("8", "4"): 32, ("2", "2"): 3}.get((local, nodes), 2)
    assert name_ranks(ranks, world, environ) == text
