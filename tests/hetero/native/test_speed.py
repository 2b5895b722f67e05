"""Which rail a message goes over: the one that would bring it first, as far as is known."""

from __future__ import annotations

from ctypes import addressof, c_void_p

import pytest

from hetero.native.binding import native
from hetero.native.headers import structure

DATA = 1
CHUNK = 512 << 10
FAST = 12e9


class Rails:
    """Rails with this much under way, of this speed (0 where it is not known)."""

    def __init__(self, *rails: tuple[int, float]) -> None:
        # Where a rail does not tell `bytes_in_flight`, its own account counts.
        self._operations = structure("rail_operations")(limits=(1, 1, 1))
        self.all = [
            structure("rail")(
                addressof(self._operations), live=True, bytes_in_flight=load, bytes_per_second=speed
            )
            for load, speed in rails
        ]

    def choose(self) -> int | None:
        table = (c_void_p * len(self.all))(*map(addressof, self.all))
        chosen = native().speed_choose(table, len(self.all), DATA, CHUNK)
        return list(table).index(chosen) if chosen else None


@pytest.mark.parametrize("load", [0, CHUNK])
def test_a_rail_that_was_never_tried_is_tried_however_fast_another_is(load: int) -> None:
    assert Rails((load, FAST), (0, 0.0)).choose() == 1


def test_one_that_is_being_tried_counts_as_fast_as_the_fastest() -> None:
    assert Rails((CHUNK, FAST), (2 * CHUNK, 0.0)).choose() == 0
    assert Rails((2 * CHUNK, FAST), (CHUNK, 0.0)).choose() == 1


def test_a_slow_rail_carries_what_it_would_bring_first() -> None:
    assert Rails((8 * CHUNK, FAST), (0, FAST / 10)).choose() == 0
    assert Rails((10 * CHUNK, FAST), (0, FAST / 10)).choose() == 1


def test_neither_a_lost_rail_nor_one_in_doubt_is_chosen() -> None:
    rails = Rails((0, FAST), (0, FAST), (9 * CHUNK, FAST))
    rails.all[0].live = False
    rails.all[1].suspected_since = 1.0
    assert rails.choose() == 2
    rails.all[2].live = False
    assert rails.choose() is None
