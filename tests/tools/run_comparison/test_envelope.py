"""The envelope: where one more seed would lie."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.tools.run_comparison.envelope import prediction_factor, seed_envelope


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
