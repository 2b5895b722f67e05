"""Which rail a message goes over: the one that would bring it first, as far as is known."""

from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_double,
    c_int,
    c_uint8,
    c_uint64,
    c_void_p,
)

import pytest

from hetero.native.binding import native

DATA = 1
CHUNK = 512 << 10
FAST = 12e9


class Rail(Structure):
    """`struct rail`."""


Room = CFUNCTYPE(c_bool, POINTER(Rail), c_int)


class Operations(Structure):
    """`struct rail_operations`, of which three matter here."""

    _fields_ = (
        *((name, c_void_p) for name in ("post_record", "post_data", "post_credit", "post_read")),
        ("has_room", Room),
        # Where there is none, the rail's own account counts.
        ("bytes_in_flight", c_void_p),
        *((f"other {index}", c_void_p) for index in range(16)),
    )


Rail._fields_ = (
    ("operations", POINTER(Operations)),
    ("index", c_uint8),
    *((name, c_bool) for name in ("live", "can_read", "is_reading", "confirms", "reads_back")),
    ("peer_reads_back", c_bool),
    *((name, c_int) for name in ("event_fd", "async_fd", "credits_in_flight")),
    ("bytes_in_flight", c_uint64),
    ("speed", c_double),
    ("last_completion", c_double),
    ("suspected_since", c_double),
)


class Rails:
    """Rails with this much under way, of this speed (0 where it is not known)."""

    def __init__(self, *rails: tuple[int, float]) -> None:
        self._library = native()
        self._room = Room(lambda rail, message: True)
        self._operations = Operations(has_room=self._room)
        self.all = [
            Rail(ctypes.pointer(self._operations), n, live=True, bytes_in_flight=load, speed=speed)
            for n, (load, speed) in enumerate(rails)
        ]
        self._table = (POINTER(Rail) * len(rails))(*map(ctypes.pointer, self.all))
        self._library.speed_choose.restype = POINTER(Rail)

    def choose(self) -> int | None:
        chosen = self._library.speed_choose(self._table, len(self.all), DATA, c_uint64(CHUNK))
        return int(chosen.contents.index) if chosen else None


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
