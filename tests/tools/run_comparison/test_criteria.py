"""The envelope of seeds, and the criteria that a candidate passes or fails."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.tools.run_comparison.alignment import align
from hetero.tools.run_comparison.comparison import Options, compare
from hetero.tools.run_comparison.criteria import (
    Finding,
    parse_criterion,
    prediction_factor,
    seed_envelope,
)
from hetero.tools.run_comparison.curves import Curve
from tests.sentences import sentence_of
from tests.tools.run_comparison.simulated_runs import Fault, simulated_run, with_loss


def test_the_band_narrows_with_every_seed_towards_that_of_a_known_spread():
    factors = [prediction_factor(seeds) for seeds in (2, 3, 4, 5, 10, 31, 1000)]
    assert factors == sorted(factors, reverse=True)
    # Student's quantiles as printed tables have them: of 2, 9 and 30 degrees of freedom.
    for seeds, quantile in ((3, 9.925), (10, 3.250), (31, 2.750)):
        assert prediction_factor(seeds) == pytest.approx(
            quantile * math.sqrt(1 + 1 / seeds), rel=1e-4
        )
    # However many there are, the band is no narrower than that of a known spread.
    assert 2.576 < factors[-1] < 2.76


def curves(seed: int, *, count: int = 3, points: int = 50) -> np.ndarray:
    return 3.0 * np.exp(0.01 * np.random.default_rng(seed).standard_normal((count, points)))


@given(st.integers(0, 10**6), st.integers(3, 6), st.floats(1e-3, 1e3))
def test_it_scales_with_the_curves_and_does_not_ask_for_their_order(seed, count, scale):
    rows, iteration = curves(seed, count=count), np.arange(1, 51)
    band, other = (
        seed_envelope(rows, iteration),
        seed_envelope(scale * rows[::-1], iteration),
    )
    assert np.allclose(scale * band.low, other.low)
    assert np.allclose(scale * band.high, other.high)
    assert (band.low > 0).all()
    assert (band.low < rows.mean(axis=0)).all()


def test_the_spread_at_an_iteration_is_that_from_half_to_twice_it():
    rows, iteration = np.full((3, 100), 2.0), np.arange(1, 101)
    rows[:, 49] *= np.exp([-0.05, 0.0, 0.05])
    band = seed_envelope(rows, iteration)
    width = np.log(band.high / band.low)
    assert np.flatnonzero(width > 1e-12).tolist() == list(range(24, 100))
    # At iteration 40 it is one of the 61 iterations from 20 to 80.
    pooled = math.sqrt(2 * 0.05**2 / 2 / 61)
    assert width[39] == pytest.approx(2 * prediction_factor(3) * pooled)


def test_the_share_inside_counts_points_and_what_is_not_finite_is_outside():
    band = seed_envelope(curves(1), np.arange(1, 51))
    curve = band.centre.copy()
    assert band.share_inside(curve) == 1.0
    curve[:5], curve[5:10] = np.nan, band.high[5:10] * 1.001
    assert band.share_inside(curve) == 0.8


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
