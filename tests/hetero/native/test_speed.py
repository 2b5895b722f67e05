"""Which rail a message goes over: the one that would bring it first, as far as is known."""

from __future__ import annotations

from collections import deque
from ctypes import addressof, byref, c_double, c_int, c_uint64, c_void_p

import pytest

from tests.hetero.native.internals import Rail, RailOperations, internals

DATA = 1
CHUNK = 512 << 10
SMALL = 4 << 10
FAST = 12e9


class Rails:
    """Rails with this much under way, of this speed (0 where it is not known)."""

    def __init__(self, *rails: tuple[int, float]) -> None:
        # Where a rail does not tell `bytes_in_flight`, its own account counts.
        self._operations = RailOperations(limits=(1, 1, 1), small_bytes=CHUNK // 2)
        self.all = [
            Rail(
                addressof(self._operations),
                index=index,
                live=True,
                bytes_in_flight=load,
                bytes_per_second=speed,
            )
            for index, (load, speed) in enumerate(rails)
        ]
        self._table = (c_void_p * len(self.all))(*map(addressof, self.all))

    def choose(self) -> int | None:
        chosen = internals().speed_choose(self._table, len(self.all), DATA, CHUNK)
        return list(self._table).index(chosen) if chosen else None

    def choose_small(self, *, last: int) -> tuple[int | None, int]:
        """The rail for a small message, and the one that is kept for the next."""
        kept = c_int(last)
        arguments = self._table, len(self.all), DATA, SMALL, byref(kept)
        chosen = internals().speed_choose_small(*arguments)
        return list(self._table).index(chosen) if chosen else None, kept.value

    def raise_idle(self) -> None:
        internals().speed_raise_idle(self._table, len(self.all))

    def complete(self, index: int, *, posted: float, now: float) -> None:
        chunk, times = c_uint64(CHUNK), (c_double(posted), c_double(now))
        internals().speed_completed(byref(self.all[index]), chunk, *times)


def carry(rails: Rails, speeds: list[float], *, seconds: float, window: int = 64) -> list[int]:
    """How many chunks each rail carries of a stream in which none is more than a window ahead.

    `speeds` are the rails' own, in bytes a second; every third of a second idle ones are raised.
    """
    for rail in rails.all:
        rail.bytes_in_flight = rail.in_flight[DATA] = 0
        rail.last_completion = 0.0
    carried, free_at, now = [0] * len(speeds), [0.0] * len(speeds), 0.0
    in_order: deque[float] = deque()
    on_rail: list[deque[tuple[float, float]]] = [deque() for _ in speeds]
    raised_at = 0.0
    while now < seconds:
        while len(in_order) < window and (index := rails.choose()) is not None:
            free_at[index] = max(now, free_at[index]) + CHUNK / speeds[index]
            in_order.append(free_at[index])
            on_rail[index].append((now, free_at[index]))
            rails.all[index].bytes_in_flight += CHUNK
            rails.all[index].in_flight[DATA] += 1
            carried[index] += 1
        now = min(queue[0][1] for queue in on_rail if queue)
        for index, queue in enumerate(on_rail):
            while queue and queue[0][1] <= now:
                posted, end = queue.popleft()
                rails.all[index].in_flight[DATA] -= 1
                rails.complete(index, posted=posted, now=end)
        while in_order and in_order[0] <= now:
            in_order.popleft()
        if now > raised_at + 0.3:
            raised_at = now
            rails.raise_idle()
    return carried


@pytest.mark.parametrize("load", [0, CHUNK])
def test_a_rail_that_was_never_tried_is_tried_however_fast_another_is(load: int) -> None:
    assert Rails((load, FAST), (0, 0.0)).choose() == 1


def test_one_that_is_being_tried_counts_as_fast_as_the_fastest() -> None:
    assert Rails((CHUNK, FAST), (2 * CHUNK, 0.0)).choose() == 0
    assert Rails((2 * CHUNK, FAST), (CHUNK, 0.0)).choose() == 1


def test_a_slow_rail_does_not_make_one_without_samples_count_as_slow() -> None:
    """A fast one may have none for long: only a connection that stays full is measured."""
    slow = 10e6
    assert Rails((CHUNK, slow), (8 * CHUNK, 0.0)).choose() == 1
    assert Rails((0, slow), (SMALL, 0.0)).choose_small(last=0) == (1, 1)


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


@pytest.mark.parametrize("fraction", [10, 100])
def test_a_rail_that_has_become_much_slower_soon_holds_nothing_back(fraction: int) -> None:
    """It is tried again now and then, and what the fast one carries hardly waits for that."""
    fast = 100e6
    rails = Rails((0, fast), (0, fast))
    carry(rails, [fast, fast / fraction], seconds=20.0)
    most, little = carry(rails, [fast, fast / fraction], seconds=60.0)
    assert most * CHUNK > 0.9 * 60 * fast
    assert 0 < little < most / 5


def test_a_rail_that_is_fast_again_gets_its_half_again() -> None:
    fast = 100e6
    rails = Rails((0, fast), (0, fast / 100))
    carry(rails, [fast, fast], seconds=90.0)
    one, other = carry(rails, [fast, fast], seconds=10.0)
    assert min(one, other) > 0.9 * max(one, other)


def test_a_short_stall_costs_a_rail_little_of_what_is_known_of_it() -> None:
    """As while a lost packet is sent again."""
    rails = Rails((0, FAST), (0, FAST))
    rails.complete(1, posted=0.0, now=0.2)
    assert rails.all[1].bytes_per_second > FAST / 3


def test_small_messages_stay_on_one_rail_though_others_are_idle() -> None:
    assert Rails((0, 0.0), (5 * SMALL, 0.0), (0, FAST)).choose_small(last=1) == (1, 1)


def test_they_leave_one_that_has_much_under_way() -> None:
    assert Rails((0, FAST), (CHUNK, FAST)).choose_small(last=1) == (0, 0)


def test_they_leave_one_without_room() -> None:
    rails = Rails((SMALL, FAST), (0, FAST), (2 * SMALL, FAST))
    rails.all[1].in_flight[DATA] = 1
    rails.all[1].bytes_in_flight = CHUNK
    assert rails.choose_small(last=1) == (0, 0)


def test_they_leave_a_slow_one() -> None:
    assert Rails((0, FAST / 3), (0, FAST)).choose_small(last=0) == (1, 1)
    assert Rails((0, FAST / 1.5), (0, FAST)).choose_small(last=0) == (0, 0)


@pytest.mark.parametrize("fault", [{"live": False}, {"suspected_since": 1.0}])
def test_they_leave_one_that_is_lost_or_in_doubt(fault: dict[str, float]) -> None:
    rails = Rails((0, FAST), (0, FAST))
    for name, value in fault.items():
        setattr(rails.all[0], name, value)
    assert rails.choose_small(last=0) == (1, 1)


def test_they_wait_where_no_rail_is_left() -> None:
    rails = Rails((0, FAST))
    rails.all[0].live = False
    assert rails.choose_small(last=0) == (None, 0)
