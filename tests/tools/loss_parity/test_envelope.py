"""The envelope: where one more seed would lie."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.loss_parity.envelope import prediction_factor, seed_envelope, student_quantile

# From printed tables of Student's distribution.
TABLE = [
    *((0.995, 1, 63.6567), (0.995, 2, 9.9248), (0.995, 3, 5.8409), (0.995, 4, 4.6041)),
    *((0.975, 5, 2.5706), (0.975, 9, 2.2622), (0.95, 10, 1.8125), (0.995, 30, 2.7500)),
]


@pytest.mark.parametrize(("probability", "freedom", "quantile"), TABLE)
def test_student_quantiles_are_those_of_the_tables(probability, freedom, quantile):
    assert student_quantile(probability, freedom) == pytest.approx(quantile, abs=5e-5)


def test_the_band_narrows_with_every_seed_towards_that_of_a_known_spread():
    factors = [prediction_factor(seeds) for seeds in (3, 4, 5, 10, 1000)]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] == pytest.approx(9.9248 * math.sqrt(4 / 3), rel=1e-4)
    assert factors[-1] == pytest.approx(2.576, abs=0.01)


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
