"""Which of the ranks that hold the same parameter are named where they do not."""

from __future__ import annotations

import pytest

from megatron.hetero.replicas import find_difference

GOOD, BAD = 7.0, 8.0


def test_ranks_that_agree_are_not_named() -> None:
    found = find_difference([{1: GOOD, 2: GOOD}, {1: GOOD}, {2: GOOD, 3: BAD}])
    assert not found.wrong
    assert not found.undecided


@pytest.mark.parametrize("wrong", range(3))
def test_of_three_the_one_that_differs_is_wrong_with_its_first_parameter(wrong: int) -> None:
    held = [{1: GOOD, 2: BAD if rank == wrong else GOOD, 3: rank == wrong} for rank in range(3)]
    found = find_difference(held)
    assert found.wrong == {wrong: 2}
    assert not found.undecided


def test_of_two_both_are_named_unless_one_is_known_to_be_wrong_elsewhere() -> None:
    assert find_difference([{1: GOOD}, {1: BAD}, {}]).undecided == {(0, 1): 1}
    found = find_difference([{1: GOOD, 2: GOOD}, {1: BAD, 2: BAD}, {2: GOOD}])
    assert (found.wrong, found.undecided) == ({1: 2}, {})
    assert [found.parameter(rank) for rank in range(3)] == [None, 2, None]
