"""Offsets of clocks from exchanges of messages: the truth is never outside the error."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.observe.clocks import SHARED, Alignment, Offset, Ping, clock_identity, offset_of
from tests import shifted_clock

seconds = st.floats(min_value=1e-6, max_value=0.1)


def pings(ahead: float, ways: list[tuple[float, float]], since: float = 1000.0) -> list[Ping]:
    """Exchanges with a clock that is so far ahead; `ways`: how long a message takes there, back."""
    made = []
    for there, back in ways:
        made.append(Ping(since, since + there + ahead, since + there + back))
        since += there + back
    return made


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(seconds, seconds), min_size=1, max_size=20))
def test_the_truth_is_within_the_error_however_unequal_the_ways_are(
    ahead: float, ways: list[tuple[float, float]]
) -> None:
    offset = offset_of(pings(ahead, ways))
    assert abs(offset.seconds - ahead) <= offset.error + 1e-8
    assert offset.error <= min(there + back for there, back in ways) / 2 + 1e-8


def test_the_fastest_of_several_exchanges_is_taken() -> None:
    offset = offset_of(pings(5.0, [(0.1, 0.3), (0.001, 0.001), (0.2, 0.2)]))
    assert offset.seconds == pytest.approx(5.0, abs=1e-9)
    assert offset.error == pytest.approx(0.001)


def test_a_clock_that_gains_is_followed_between_two_measurements() -> None:
    gains = 1e-4
    alignment = Alignment(Offset(100.0, 7.0, 1e-5), Offset(200.0, 7.0 + 100 * gains, 3e-5))
    for elapsed in (0.0, 25.0, 100.0):
        here = 100.0 + elapsed
        assert alignment.turned(here) == pytest.approx(93.0 + elapsed * (1 - gains), abs=1e-9)
    assert alignment.error == 3e-5


def test_a_clock_is_itself() -> None:
    assert SHARED.turned(123.25) == 123.25
    assert SHARED.error == 0.0


def identity_after(before: str) -> str:
    code = before + "\nfrom hetero.observe.clocks import clock_identity; print(clock_identity())"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_processes_of_a_host_read_one_clock() -> None:
    assert identity_after("") == clock_identity()


def test_another_time_namespace_has_another_clock() -> None:
    if (reason := shifted_clock.why_impossible()) is not None:
        pytest.skip(reason)
    assert identity_after(shifted_clock.shift(3600)) != clock_identity()
