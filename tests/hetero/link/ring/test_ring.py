"""Counters of 32 bits that count round."""

from __future__ import annotations

import pytest

from hetero.link.ring import ahead


@pytest.mark.parametrize(("newer", "older", "difference"), [(5, 3, 2), (3, 5, -2)])
@pytest.mark.parametrize("start", [0, 2**32 - 4])
def test_counters_are_compared_counting_round(
    newer: int, older: int, difference: int, start: int
) -> None:
    assert ahead((start + newer) & 0xFFFFFFFF, (start + older) & 0xFFFFFFFF) == difference
