"""When a wait is reported."""

from __future__ import annotations

import pytest

from hetero.wait_reporter import WaitIntervals, WaitReporter


def test_a_line_is_printed_after_the_first_interval_and_then_at_each_further() -> None:
    now, said = [0.0], []
    waiting = WaitReporter(WaitIntervals(first=10, again=30), clock=lambda: now[0], say=said.append)
    for now[0] in range(0, 100, 2):
        waiting.report("rank 1")
    assert said == [f"waiting for rank 1, {s} s so far" for s in (10, 30, 60, 90)]


def test_whom_is_called_only_when_a_line_is_due_and_may_skip_it() -> None:
    now, said = [0.0], []
    waiting = WaitReporter(WaitIntervals(first=1, again=1), clock=lambda: now[0], say=said.append)
    waiting.report(lambda: pytest.fail("it is not due"))
    now[0] = 5.0
    waiting.report(lambda: None)
    assert said == []
