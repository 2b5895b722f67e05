"""Smoothed curves: each point is the mean of the last few iterations, of whole windows only."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from hetero.tools.run_comparison.curves import Curve, Floats, Integers

_LARGEST_WINDOW = 200


def default_window(iterations: int) -> int:
    """A tenth of what is compared, at most 200 iterations."""
    return max(1, min(_LARGEST_WINDOW, iterations // 10))


def running_mean(values: Floats, window: int) -> Floats:
    """Mean of each `window` consecutive values; shorter than `values` by `window` - 1.

    What is not finite spoils the windows that it lies in, and no others.
    """
    return np.asarray(sliding_window_view(values, window).mean(axis=-1), dtype=np.float64)


def smoothed_iterations(curve: Curve, window: int) -> Integers:
    """The last iteration of each window."""
    return curve.iteration[window - 1 :]


def smoothed_loss(curve: Curve, window: int) -> Floats:
    return running_mean(curve.loss, window)


def smoothed_grad_norm(curve: Curve, window: int) -> Floats:
    """The geometric mean, which one spike does not carry away."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithm = np.log(forward_filled_grad_norm(curve))
        return np.exp(running_mean(logarithm, window))


def forward_filled_grad_norm(curve: Curve) -> Floats:
    """The gradient norm, with the last one before it where a skipped update left none."""
    missing = curve.skipped & ~np.isfinite(curve.grad_norm)
    if not missing.any() or missing.all():
        return curve.grad_norm
    positions = np.where(missing, -1, np.arange(len(curve)))
    held = np.maximum.accumulate(positions)
    return curve.grad_norm[np.where(held < 0, np.flatnonzero(~missing)[0], held)]


def has_grad_norm(curve: Curve) -> bool:
    return bool(np.isfinite(curve.grad_norm).any())
