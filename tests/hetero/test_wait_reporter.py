"""When a wait is reported."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hetero import wait_reporter
from hetero.wait_reporter import WaitReporter
from tests.sentences import without_time


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr(wait_reporter, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def test_a_line_is_printed_after_the_first_interval_and_then_at_each_further(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = WaitReporter()
    for now[0] in range(0, 100, 2):
        waiting.report("rank 1")
    said = without_time(capsys.readouterr().err).splitlines()
    assert said == [f"waiting for rank 1, {s} s so far" for s in (10, 30, 60, 90)]


def test_whom_is_called_only_when_a_line_is_due_and_may_skip_it(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = WaitReporter()
    waiting.report(lambda: pytest.fail("it is not due"))
    now[0] = 15.0
    waiting.report(lambda: None)
    assert capsys.readouterr().err == ""
