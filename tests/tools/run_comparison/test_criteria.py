"""Each named criterion: what it measures, and what it takes for a bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetero.tools.run_comparison.alignment import align
from hetero.tools.run_comparison.criteria import Finding, parse_criterion
from hetero.tools.run_comparison.curves import Curve
from hetero.tools.run_comparison.loss_comparison import Options, compare
from tests.sentences import sentence_of
from tests.tools.run_comparison.simulated_runs import Fault, simulated_run, with_loss

REFERENCE = simulated_run(1, iterations=100)
SEEDS = [simulated_run(2, iterations=100), simulated_run(3, iterations=100)]


def finding(criterion: str, candidate: Curve, *, seeds=(), window=10, first=10) -> Finding:
    """What one criterion says of a candidate beside the reference."""
    aligned = align(REFERENCE, seeds=list(seeds), candidates=[candidate])
    options = Options(criteria=(parse_criterion(criterion),), window=window, first=first)
    (verdict,) = compare(aligned, options).verdicts
    return verdict.findings[-1]


def scaled(factor: float, positions: slice, *, column: str = "loss") -> Curve:
    values = getattr(REFERENCE, column).copy()
    values[positions] *= factor
    return replace(REFERENCE, **{column: values})


def test_identical_compares_bits_and_schedule_compares_rates():
    assert finding("identical", REFERENCE).passed
    found = finding("identical", scaled(1 + 1e-15, slice(30, 33)))
    assert (found.passed, found.value) == (False, 3)
    assert "the first is 31" in found.detail
    assert finding("schedule", REFERENCE).passed
    found = finding("schedule", scaled(1.1, slice(50, 51), column="learning_rate"))
    assert (found.passed, found.value) == (False, pytest.approx(0.1))
    assert "at iteration 51" in found.detail
    assert not finding("schedule", scaled(1.1, slice(None), column="weight_decay")).passed


@pytest.mark.parametrize(
    ("name", "column"), [("first-steps", "loss"), ("first-grad-norms", "grad_norm")]
)
def test_first_steps_look_at_the_first_iterations_alone(name, column):
    found = finding(f"{name}=0.01", scaled(1.02, slice(4, 5), column=column))
    assert (found.passed, found.value) == (False, pytest.approx(0.02))
    assert "first 10 iterations, at 5" in found.detail
    assert finding(f"{name}=0.03", scaled(1.02, slice(4, 5), column=column)).passed
    later = scaled(1.02, slice(10, 100), column=column)
    assert finding(f"{name}=0.01", later).value == 0.0
    assert not finding(f"{name}=0.01", later, first=11).passed


def test_final_relative_and_smoothed_relative_criteria():
    found = finding("final-relative", scaled(1.01, slice(90, 100)))
    assert (found.passed, found.value) == (False, pytest.approx(0.01))
    assert finding("final-relative", scaled(1.01, slice(0, 90))).value == 0.0
    assert finding("final-relative=0.011", scaled(1.01, slice(90, 100))).passed
    found = finding("smoothed-relative", scaled(0.98, slice(30, 40)))
    assert (found.passed, found.value) == (False, pytest.approx(0.02))
    assert "up to 40" in found.detail
    assert finding("smoothed-relative", scaled(0.98, slice(30, 31))).passed


def test_the_envelopes_count_the_smoothed_points_inside():
    for name, column in (("envelope", "loss"), ("grad-norm-envelope", "grad_norm")):
        assert finding(name, REFERENCE, seeds=SEEDS).value == 1.0
        found = finding(name, scaled(2.0, slice(50, 100), column=column), seeds=SEEDS)
        assert found.passed is False
        # The window that ends at 51 holds one wrong iteration, that at 60 ten.
        assert 40 / 91 < found.value < 50 / 91
        assert "to 100" in found.detail
        assert finding(
            f"{name}=0.4", scaled(2.0, slice(50, 100), column=column), seeds=SEEDS
        ).passed


@pytest.mark.parametrize("loss", [np.nan, np.inf])
@pytest.mark.parametrize("position", [0, 55, 99])
def test_a_loss_that_is_no_number_fails_whatever_else_is_asked(loss, position):
    candidate = with_loss(REFERENCE, position, loss)
    aligned = align(REFERENCE, seeds=SEEDS, candidates=[candidate])
    (verdict,) = compare(aligned, Options(criteria=(parse_criterion("schedule"),))).verdicts
    assert not verdict.passed
    assert verdict.findings[0].criterion == "finite"
    assert f"the loss of iteration {position + 1} is NaN" in verdict.findings[0].detail


@pytest.mark.parametrize(
    ("criterion", "position"),
    [("first-steps", 3), ("final-relative", 95), ("smoothed-relative", 40), ("identical", 50)],
)
def test_no_criterion_takes_a_number_that_is_none_for_a_small_one(criterion, position):
    assert not finding(criterion, with_loss(REFERENCE, position, np.nan)).passed


def test_a_gradient_norm_that_is_missing_is_fine_where_the_update_was_skipped():
    norms = REFERENCE.grad_norm.copy()
    norms[20] = np.nan
    skipped = np.arange(100) == 20
    names = Options(criteria=(parse_criterion("final-relative"),))
    for flags, passes in ((skipped, True), (~skipped, False)):
        candidate = replace(REFERENCE, grad_norm=norms, skipped=flags)
        (verdict,) = compare(align(REFERENCE, seeds=[], candidates=[candidate]), names).verdicts
        assert verdict.passed is passes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("final", "there is no 'final'; choose from identical, schedule"),
        ("final-relative=", "'' is no number"),
        ("final-relative=-1", "'-1' is no number"),
        ("final-relative=nan", "'nan' is no number"),
        ("final-relative=inf", "'inf' is no number"),
        ("envelope=95", "'95' is no share"),
        ("envelope=0", "'0' is no share"),
        ("identical=1", "takes no bound"),
    ],
)
def test_a_criterion_that_makes_no_sense_is_refused(text, says):
    assert says in sentence_of(parse_criterion, text)


def test_doubled_gradients_of_a_stage_show_in_the_norm():
    """Adam divides the scale out, so that the loss hardly moves."""
    candidate = simulated_run(1, iterations=100, rounding=1e-3, fault=Fault(grad_norm=1.58))
    assert finding("final-relative", candidate).passed
    assert finding("envelope", candidate, seeds=SEEDS).passed
    assert not finding("first-grad-norms", candidate).passed
