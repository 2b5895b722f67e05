"""The sender's book of a ring: entries never overlap, and space comes back in order."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.transport.ordered.ring import ENTRIES, Allotment, ahead

SIZE = 1 << 16


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, 4)), min_size=1, max_size=200),
    st.sampled_from([0, 2**32 - 3]),
)
def test_entries_in_flight_never_overlap(steps: list[tuple[int, int]], start: int) -> None:
    """Each step asks for some bytes, after the peer has retired some entries."""
    book = Allotment(SIZE)
    book._freed = start
    taken = retired = start
    in_flight: deque[tuple[int, int]] = deque()
    for nbytes, finished in steps:
        retired = min(retired + finished, taken)
        placed = book.take(nbytes, retired=retired & 0xFFFFFFFF)
        if placed is None:
            continue
        place, freed = placed
        while len(in_flight) > taken - freed:
            in_flight.popleft()
        assert freed <= retired, "space that is still in use was given away"
        assert 0 <= place <= place + nbytes <= SIZE
        if nbytes:
            assert all(place + nbytes <= p or place >= p + n for p, n in in_flight if n)
        in_flight.append((place, nbytes))
        taken += 1


def test_a_full_ring_gives_nothing_until_an_entry_is_retired() -> None:
    book = Allotment(SIZE)
    assert book.take(SIZE // 2, retired=0) == (0, 0)
    assert book.take(SIZE // 2, retired=0) == (SIZE // 2, 0)
    assert book.take(1, retired=0) is None
    assert book.take(1, retired=1) == (0, 1)


def test_an_entry_lies_in_one_piece() -> None:
    book = Allotment(SIZE)
    assert book.take(SIZE - 512, retired=0) == (0, 0)
    assert book.take(1024, retired=1) == (0, 1)


def test_no_more_entries_are_in_flight_than_there_are_records() -> None:
    book = Allotment(1 << 30)
    for number in range(ENTRIES):
        assert book.take(0, retired=0) == (0, 0), number
    assert book.take(0, retired=0) is None
    assert book.take(0, retired=1) is not None


@pytest.mark.parametrize(("newer", "older", "difference"), [(5, 3, 2), (3, 5, -2)])
@pytest.mark.parametrize("start", [0, 2**32 - 4])
def test_counters_are_compared_counting_round(
    newer: int, older: int, difference: int, start: int
) -> None:
    assert ahead((start + newer) & 0xFFFFFFFF, (start + older) & 0xFFFFFFFF) == difference
