"""A doorbell that one thread polls, or sleeps on, and another rings."""

from __future__ import annotations

import ctypes
import time

import pytest

from hetero.native.binding import RingWord, native
from tests.hetero.link.joined import meanwhile

LIBRARY = native()


def test_a_word_that_has_changed_is_not_waited_for() -> None:
    word = RingWord(value=1)
    # Longer than a test may take.
    assert LIBRARY.host_wait_word(ctypes.addressof(word), 1, 0, 310_000)


def test_waiting_ends_after_the_time_given() -> None:
    word = RingWord()
    began = time.monotonic()
    assert not LIBRARY.host_wait_word(ctypes.addressof(word), 1, 0, 200)
    assert time.monotonic() - began >= 0.15


@pytest.mark.parametrize("spin", [0, 30_000_000], ids=["asleep", "polling"])
@pytest.mark.parametrize("before", [0, 2**32 - 1])
def test_whoever_waits_is_woken_and_others_run_meanwhile(before: int, spin: int) -> None:
    word = RingWord(value=before)

    def sleep() -> None:
        assert LIBRARY.host_wait_word(ctypes.addressof(word), before + 1, spin, 30_000)

    with meanwhile(sleep) as sleeper:
        # This thread goes on while the other sleeps: the wait does not hold the GIL.
        time.sleep(0.1)
        assert sleeper.is_alive()
        LIBRARY.host_ring_doorbell(ctypes.addressof(word))
        assert word.value == (before + 1) % 2**32
