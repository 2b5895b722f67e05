"""Where a further seed of the homogeneous run would lie: a band around the curves of some seeds.

docs/parity.md derives it. In short: at each iteration the band is the 99 % prediction interval for
one more curve, from the mean and the spread of the logarithms of the seeds' smoothed curves, the
spread being the root mean square over the iterations from half to twice the one in question.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hetero.tools.run_comparison.curves import Floats, Integers

FEWEST_SEEDS = 3
_STUDENT = (
    *(63.6567, 9.9248, 5.8409, 4.6041, 4.0321, 3.7074, 3.4995, 3.3554, 3.2498, 3.1693),
    *(3.1058, 3.0545, 3.0123, 2.9768, 2.9467, 2.9208, 2.8982, 2.8784, 2.8609, 2.8453),
    *(2.8314, 2.8188, 2.8073, 2.7969, 2.7874, 2.7787, 2.7707, 2.7633, 2.7564, 2.75),
)
"""Student's distribution: what 99 % lie within on both sides, by degrees of freedom from 1 on. The
last stands for more of them too, which makes the band a little wide."""


@dataclass(frozen=True, eq=False)
class Envelope:
    """The band, at the iterations of the smoothed curves, in the curves' own unit."""

    iteration: Integers
    centre: Floats
    low: Floats
    high: Floats

    def share_inside(self, smoothed: Floats) -> float:
        """How much of a smoothed curve lies inside, 0 to 1; what is not finite does not."""
        return float(np.mean((smoothed >= self.low) & (smoothed <= self.high)))


def seed_envelope(smoothed: Floats, iteration: Integers) -> Envelope:
    """The band of several seeds' smoothed curves: one row each, one column an iteration.

    They must be above zero: the spread is that of ratios.
    """
    seeds = len(smoothed)
    logarithm = np.log(smoothed)
    centre = logarithm.mean(axis=0)
    variance = ((logarithm - centre) ** 2).sum(axis=0) / (seeds - 1)
    half_width = prediction_factor(seeds) * np.sqrt(_pooled(variance, iteration))
    return Envelope(
        iteration=iteration,
        centre=np.exp(centre),
        low=np.exp(centre - half_width),
        high=np.exp(centre + half_width),
    )


def _pooled(variance: Floats, iteration: Integers) -> Floats:
    """Mean over the iterations from half to twice each: training unfolds in the logarithm of it."""
    begins = np.searchsorted(iteration, iteration / 2, side="left")
    ends = np.searchsorted(iteration, iteration * 2, side="right")
    sums = np.concatenate(([0.0], np.cumsum(variance)))
    return np.asarray((sums[ends] - sums[begins]) / (ends - begins), dtype=np.float64)


def prediction_factor(seeds: int) -> float:
    """Half the width of the band in standard deviations of the seeds.

    The spread is known from `seeds` - 1 differences, whatever the number of iterations: seeds part
    for long stretches, in which further iterations tell nothing new. The mean is itself uncertain,
    as one more curve is.
    """
    quantile = _STUDENT[min(seeds - 1, len(_STUDENT)) - 1]
    return quantile * math.sqrt(1.0 + 1.0 / seeds)
