"""A doorbell on which one thread sleeps and another wakes it, and two words that one looks at."""

from __future__ import annotations

import ctypes
import time

import pytest

from hetero.native.binding import native
from hetero.native.structures import RingWord
from tests.hetero.link.joined import meanwhile

LIBRARY = native()


def test_a_word_that_has_changed_is_not_waited_for() -> None:
    word = RingWord(value=1)
    # Longer than a test may take.
    assert LIBRARY.host_wait_word(ctypes.addressof(word), 1, 310_000)


def test_waiting_ends_after_the_time_given() -> None:
    word = RingWord()
    began = time.monotonic()
    assert not LIBRARY.host_wait_word(ctypes.addressof(word), 1, 200)
    assert time.monotonic() - began >= 0.15


@pytest.mark.parametrize("before", [0, 2**32 - 1])
def test_a_sleeper_is_woken_and_others_run_meanwhile(before: int) -> None:
    word = RingWord(value=before)

    def sleep() -> None:
        assert LIBRARY.host_wait_word(ctypes.addressof(word), before + 1, 30_000)

    with meanwhile(sleep) as sleeper:
        # This thread goes on while the other sleeps: the wait does not hold the GIL.
        time.sleep(0.1)
        assert sleeper.is_alive()
        LIBRARY.host_ring_doorbell(ctypes.addressof(word))
        assert word.value == (before + 1) % 2**32


def seen(word: ctypes.c_uint32) -> tuple[int, int]:
    return ctypes.addressof(word), word.value


@pytest.mark.parametrize("changed", [0, 1])
def test_spinning_ends_when_either_word_changes(changed: int) -> None:
    words = ctypes.c_uint32(2**32 - 1), ctypes.c_uint32(7)
    before = seen(words[0]), seen(words[1])

    def spin() -> None:
        while (seen(words[0]), seen(words[1])) == before:
            LIBRARY.native_spin(*before[0], *before[1], 30_000_000)

    with meanwhile(spin):
        words[changed].value = 1


def test_spinning_ends_after_the_time_given() -> None:
    words = ctypes.c_uint32(0), ctypes.c_uint32(0)
    began = time.monotonic()
    LIBRARY.native_spin(*seen(words[0]), *seen(words[1]), 100_000)
    assert time.monotonic() - began >= 0.09
