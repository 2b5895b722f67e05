"""Where a further seed of the homogeneous run would lie: a band around the curves of some seeds.

docs/parity.md derives it. In short: at each iteration the band is the 99 % prediction interval for
one more curve, from the mean and the spread of the logarithms of the seeds' smoothed curves, the
spread being the root mean square over the iterations from half to twice the one in question.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tools.loss_parity.curves import Floats, Integers

FEWEST_SEEDS = 3
CONFIDENCE = 0.99


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
    return student_quantile((1.0 + CONFIDENCE) / 2.0, seeds - 1) * math.sqrt(1.0 + 1.0 / seeds)


def student_quantile(probability: float, freedom: int) -> float:
    """Of Student's distribution, for a `probability` from 1/2 to below 1."""
    low, high = 0.0, 1.0
    while _student_probability(high, freedom) < probability:
        high *= 2.0
    for _ in range(100):
        middle = (low + high) / 2.0
        if _student_probability(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return high


def _student_probability(value: float, freedom: int) -> float:
    """The distribution function: a finite sum of powers of a cosine, odd ones if `freedom` is."""
    angle = math.atan(value / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = cosine if odd else 1.0, 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    if odd:
        return 0.5 + (angle + sine * total) / math.pi
    return 0.5 + sine * total / 2.0
