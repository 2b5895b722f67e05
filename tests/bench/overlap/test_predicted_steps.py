"""What of a wire 1F1B hides, and how the iterations of a run are shared out."""

from __future__ import annotations

import pytest

from bench.measure_overlap import phases_of, rows_of
from bench.overlap.phases import as_variable, from_variable, phase_of
from bench.overlap.predicted_steps import Passes, predict

PASSES = Passes(forward=(1.0, 1.0), backward=(2.0, 2.0), micro_batches=8, step=28.0)


def test_two_stages_of_1f1b_wait_once_a_micro_batch_and_hide_the_other_crossing() -> None:
    without = predict(PASSES, crossing=0.0)
    assert without.nothing == without.overlapped == without.hidden == PASSES.step
    predicted = predict(PASSES, crossing=0.5)
    assert predicted.hidden == PASSES.step + 2 * 0.5
    assert predicted.overlapped == PASSES.step + 8 * 0.5
    assert predicted.nothing == PASSES.step + 16 * 0.5
    # A wire that is slower than the stages sets the pace.
    assert predict(PASSES, crossing=10.0).hidden > 80.0


def test_phases_follow_each_other_and_the_last_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = phases_of([1.0], 2)
    for name, value in as_variable(phases).items():
        monkeypatch.setenv(name, value)
    assert from_variable() == phases
    assert [phase_of(phases, i) for i in range(13)] == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4]
    assert [(p.bytes_per_s, p.receives_early) for p in phases[1:]] == [
        *((None, False), (None, True), (1e9, False), (1e9, True))
    ]


def test_a_row_has_the_medians_of_its_phases() -> None:
    phases = phases_of([1.0], 1)
    records = [{"elapsed_ms": 1000.0 * n} for n in range(7)]
    plain, slowed = rows_of(records, phases, {1e9: 0.5e9}, passes=PASSES, tensor=10**9)
    assert (plain.when_asked, plain.early, plain.predicted) == (3.0, 4.0, None)
    assert (slowed.when_asked, slowed.early, slowed.measured) == (5.0, 6.0, 0.5e9)
    assert slowed.predicted == predict(PASSES, crossing=2.0)
