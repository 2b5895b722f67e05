"""The named criteria that a candidate passes or fails. docs/parity.md says what each can see."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hetero.errors import UserError
from hetero.text import counted
from hetero.tools.run_comparison.alignment import (
    SCHEDULE_TOLERANCE,
    compare_bitwise,
    relative_difference,
    schedule_difference,
)
from hetero.tools.run_comparison.curves import (
    Curve,
    Floats,
    Integers,
    forward_filled_grad_norm,
    has_grad_norm,
    smoothed_grad_norm,
    smoothed_iterations,
    smoothed_loss,
)

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


@dataclass(frozen=True)
class Criterion:
    """What is asked of a candidate: the name of a rule, and its bound."""

    name: str
    bound: float

    @property
    def needs_seeds(self) -> bool:
        return self.name in ("envelope", "grad-norm-envelope")

    @property
    def needs_grad_norm(self) -> bool:
        return "grad-norm" in self.name

    @property
    def needs_same_seed(self) -> bool:
        return self.name in ("first-steps", "first-grad-norms")

    @property
    def is_least(self) -> bool:
        """Whether the value must reach the bound, rather than stay within it."""
        return self.needs_seeds


@dataclass(frozen=True)
class Finding:
    """What one criterion said of one candidate."""

    criterion: str
    value: float | None
    bound: float | None
    passed: bool | None
    """None where the criterion was not applied; `detail` says why."""
    detail: str


@dataclass(frozen=True)
class Pair:
    """A candidate beside the reference, at the same iterations."""

    reference: Curve
    candidate: Curve
    window: int
    """Iterations of a smoothed point."""
    first: int
    """Iterations that count as the first ones."""
    envelopes: Mapping[str, Envelope]
    """Of `loss` and `grad_norm`, where there are seeds."""


Rule = Callable[[Pair, float], Finding]


def finite(pair: Pair) -> Finding:
    """Applied always: a run that met a loss that is no number has not trained the same."""
    curve = pair.candidate
    bad = ~np.isfinite(curve.loss) | (~curve.skipped & ~np.isfinite(curve.grad_norm))
    if not has_grad_norm(pair.reference):
        bad = ~np.isfinite(curve.loss)
    where = np.flatnonzero(bad)
    detail = "every loss and every gradient norm is a number"
    if len(where):
        at = where[0]
        what = "gradient norm" if math.isfinite(curve.loss[at]) else "loss"
        detail = f"the {what} of iteration {curve.iteration[at]} is NaN, infinite or missing"
    return Finding("finite", float(len(where)), 0.0, not len(where), detail)


def _schedule(pair: Pair, bound: float) -> Finding:
    found = schedule_difference(pair.candidate, pair.reference)
    if found is None:
        return not_applied(
            Criterion("schedule", bound),
            "the runs skipped different updates, or a file tells no learning rate",
        )
    value, at = found
    detail = f"learning rate and weight decay, largest at iteration {_at(pair, at)}"
    return _within("schedule", value, bound, detail if value else "equal at every iteration")


def _identical(pair: Pair, bound: float) -> Finding:
    bitwise = compare_bitwise(pair.candidate, pair.reference)
    differ = np.flatnonzero(~bitwise.same)
    what = "losses, gradient norms and weights" if bitwise.weights_identical else None
    detail = f"{what or 'losses and gradient norms'} are equal, bit for bit"
    if len(differ):
        detail = f"iterations that differ; the first is {_at(pair, int(differ[0]))}"
    elif bitwise.weights_identical is False:
        detail = "no iteration differs, but the weights at the end do"
    return Finding("identical", float(len(differ)), bound, bitwise.identical, detail)


def _first_steps(pair: Pair, bound: float) -> Finding:
    values = pair.candidate.loss, pair.reference.loss
    return _first(pair, "first-steps", bound, *values)


def _first_grad_norms(pair: Pair, bound: float) -> Finding:
    values = forward_filled_grad_norm(pair.candidate), forward_filled_grad_norm(pair.reference)
    return _first(pair, "first-grad-norms", bound, *values)


def _first(pair: Pair, name: str, bound: float, mine: Floats, theirs: Floats) -> Finding:
    difference = np.abs(relative_difference(mine[: pair.first], theirs[: pair.first]))
    value, at = _largest(difference)
    what = f"largest of the first {counted(len(difference), 'iteration')}, at {_at(pair, at)}"
    return _within(name, value, bound, what)


def _final_relative(pair: Pair, bound: float) -> Finding:
    mine, theirs = _smoothed_losses(pair)
    value = float(np.abs(relative_difference(mine[-1:], theirs[-1:]))[0])
    last = counted(pair.window, "iteration")
    detail = f"mean loss of the last {last}: {mine[-1]:.6g}, not {theirs[-1]:.6g}"
    return _within("final-relative", value, bound, detail)


def _smoothed_relative(pair: Pair, bound: float) -> Finding:
    value, at = _largest(np.abs(relative_difference(*_smoothed_losses(pair))))
    last = smoothed_iterations(pair.reference, pair.window)[at]
    detail = f"largest of the means over {counted(pair.window, 'iteration')}, up to {last}"
    return _within("smoothed-relative", value, bound, detail)


def _envelope(pair: Pair, bound: float) -> Finding:
    smoothed = smoothed_loss(pair.candidate, pair.window)
    return _inside("envelope", pair.envelopes["loss"], smoothed, bound)


def _grad_norm_envelope(pair: Pair, bound: float) -> Finding:
    smoothed = smoothed_grad_norm(pair.candidate, pair.window)
    return _inside("grad-norm-envelope", pair.envelopes["grad_norm"], smoothed, bound)


def _inside(name: str, envelope: Envelope, smoothed: Floats, bound: float) -> Finding:
    value = envelope.share_inside(smoothed)
    outside = envelope.iteration[~((smoothed >= envelope.low) & (smoothed <= envelope.high))]
    detail = "share of smoothed points inside"
    if len(outside):
        detail += f"; outside from iteration {outside[0]} to {outside[-1]}"
    return Finding(name, value, bound, value >= bound, detail)


def _smoothed_losses(pair: Pair) -> tuple[Floats, Floats]:
    return smoothed_loss(pair.candidate, pair.window), smoothed_loss(pair.reference, pair.window)


def _largest(values: Floats) -> tuple[float, int]:
    """The largest value and where it is; a value that is not a number counts as the largest."""
    at = int(np.argmax(np.where(np.isnan(values), math.inf, values)))
    return float(values[at]), at


def _at(pair: Pair, position: int) -> int:
    return int(pair.reference.iteration[position])


def _within(name: str, value: float, bound: float, detail: str) -> Finding:
    return Finding(name, value, bound, value <= bound, detail)


def not_applied(criterion: Criterion, why: str) -> Finding:
    return Finding(criterion.name, None, criterion.bound, None, why)


RULES: Mapping[str, tuple[float, Rule]] = {
    "identical": (0.0, _identical),
    "schedule": (SCHEDULE_TOLERANCE, _schedule),
    "first-steps": (1e-3, _first_steps),
    "first-grad-norms": (2e-2, _first_grad_norms),
    "final-relative": (7e-3, _final_relative),
    "smoothed-relative": (7e-3, _smoothed_relative),
    "envelope": (0.95, _envelope),
    "grad-norm-envelope": (0.95, _grad_norm_envelope),
}
"""The bound where none is given, and the rule. Where each bound comes from: docs/parity.md."""

DEFAULT_CRITERIA = (
    *("schedule", "first-steps", "first-grad-norms", "final-relative"),
    *("envelope", "grad-norm-envelope"),
)

SAME_START = 1e-4
"""Relative difference of the first losses below which two runs are taken to have one seed: rounding
gives less, other initial weights and other data more, unless batches hold millions of tokens."""


def has_same_initial_loss(reference: Curve, candidate: Curve) -> bool:
    """Whether a candidate's first loss is the reference's but for rounding."""
    return bool(np.abs(relative_difference(candidate.loss, reference.loss))[0] <= SAME_START)


def parse_criterion(text: str) -> Criterion:
    """From `NAME` or `NAME=BOUND`. Raises UserError."""
    name, has_bound, number = text.partition("=")
    if name not in RULES:
        raise UserError(f"--criteria {text}: there is no {name!r}; choose from {', '.join(RULES)}")
    if not has_bound:
        return Criterion(name, RULES[name][0])
    if name == "identical":
        raise UserError(f"--criteria {text}: identical takes no bound; give it without")
    try:
        bound = float(number)
    except ValueError:
        bound = math.nan
    criterion = Criterion(name, bound)
    if not (0.0 < bound <= 1.0 if criterion.is_least else 0.0 <= bound < math.inf):
        what = (
            "share of the points, above 0 and up to 1" if criterion.is_least else "number from 0 on"
        )
        raise UserError(f"--criteria {text}: {number!r} is no {what}")
    return criterion


def check_seeds(criteria: tuple[Criterion, ...], seeds: int) -> None:
    """Refuse an envelope of too few runs. `seeds` counts the reference."""
    named = [criterion.name for criterion in criteria if criterion.needs_seeds]
    if named and seeds < FEWEST_SEEDS:
        raise UserError(
            f"{named[0]} needs {FEWEST_SEEDS} homogeneous runs that differ in nothing but --seed, "
            f"and has {seeds}; give at least {FEWEST_SEEDS - 1} files with --seeds, besides the "
            "reference"
        )


def judge(pair: Pair, criterion: Criterion) -> Finding:
    return RULES[criterion.name][1](pair, criterion.bound)
