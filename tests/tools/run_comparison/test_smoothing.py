"""Smoothed curves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.tools.run_comparison.smoothing import (
    default_window,
    forward_filled_grad_norm,
    running_mean,
    smoothed_grad_norm,
    smoothed_iterations,
)
from tests.tools.run_comparison.simulated_runs import simulated_run


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=40), st.data())
def test_every_point_is_the_mean_of_one_whole_window(values, data):
    window = data.draw(st.integers(1, len(values)))
    means = running_mean(np.array(values), window)
    assert len(means) == len(values) - window + 1
    for position, mean in enumerate(means):
        assert mean == pytest.approx(sum(values[position : position + window]) / window)


def test_a_window_is_named_by_its_last_iteration_and_spoilt_by_what_it_holds_alone():
    run = simulated_run(1, iterations=20)
    assert smoothed_iterations(run, 5).tolist() == list(range(5, 21))
    means = running_mean(np.array([1.0, 1.0, np.nan, 1.0, 1.0, 1.0]), 2)
    assert np.isnan(means).tolist() == [False, True, True, False, False]


def test_one_spike_does_not_carry_the_smoothed_gradient_norm_away():
    run = simulated_run(1, iterations=100)
    spiked = run.grad_norm.copy()
    spiked[50] *= 1000
    ratio = smoothed_grad_norm(replace(run, grad_norm=spiked), 50) / smoothed_grad_norm(run, 50)
    assert ratio.max() == pytest.approx(1000 ** (1 / 50))


def test_a_skipped_update_that_left_no_gradient_norm_holds_the_one_before():
    run = simulated_run(1, iterations=5)
    run = replace(
        run,
        grad_norm=np.array([np.nan, 2.0, np.nan, np.nan, 3.0]),
        skipped=np.array([True, False, True, False, False]),
    )
    held = forward_filled_grad_norm(run)
    assert held[[0, 1, 2, 4]].tolist() == [2.0, 2.0, 2.0, 3.0]
    # That one was not skipped: something is wrong with it.
    assert np.isnan(held[3])


@pytest.mark.parametrize(("iterations", "window"), [(1, 1), (9, 1), (300, 30), (10**6, 200)])
def test_by_default_a_tenth_is_smoothed_over(iterations, window):
    assert default_window(iterations) == window
