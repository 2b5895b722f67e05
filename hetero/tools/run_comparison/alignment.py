"""Puts the curves of several runs side by side, and refuses runs that were not the same job.

Two runs of one job may be compared bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from hetero.errors import UserError
from hetero.text import counted
from hetero.tools.run_comparison.curves import Curve, Floats, span


@dataclass(frozen=True, eq=False)
class BitwiseComparison:
    """A run beside the one that it is compared with, over the same iterations."""

    run: Curve
    reference: Curve

    @cached_property
    def same(self) -> NDArray[np.bool_]:
        """For each iteration whether loss and gradient norm are the same, bit for bit."""
        pairs = (
            (self.run.loss, self.reference.loss),
            (self.run.grad_norm, self.reference.grad_norm),
        )
        losses, norms = (mine.view(np.int64) == theirs.view(np.int64) for mine, theirs in pairs)
        return np.asarray(losses & norms)

    @property
    def losses_identical(self) -> bool:
        """Losses and gradient norms of every iteration."""
        return bool(self.same.all())

    @property
    def weights_identical(self) -> bool | None:
        """None where one of the runs does not tell its weights."""
        if not self.run.weights or not self.reference.weights:
            return None
        return self.run.weights == self.reference.weights

    @property
    def identical(self) -> bool:
        """Everything that is known of both."""
        return self.losses_identical and self.weights_identical is not False

    @property
    def loss_difference(self) -> float:
        """The largest difference of an iteration's losses."""
        with np.errstate(invalid="ignore"):
            apart = np.abs(self.run.loss - self.reference.loss)
        return float(np.max(np.where(self.same, 0.0, apart), initial=0.0))

    @property
    def relative_losses(self) -> float:
        """The largest of an iteration, relative to the reference's."""
        return _largest_relative(self.run.loss, self.reference.loss)

    @property
    def relative_grad_norms(self) -> float:
        """The same of gradient norms; infinite where only one of the runs skipped an update."""
        return _largest_relative(self.run.grad_norm, self.reference.grad_norm)


def compare_bitwise(run: Curve, reference: Curve) -> BitwiseComparison:
    """Put a run beside another. Raises UserError where their iterations are not the same."""
    if not np.array_equal(run.iteration, reference.iteration):
        raise UserError(
            f"{run.name} ({span(run)}) and {reference.name} ({span(reference)}) have not trained "
            "the same iterations; see the log of the one that ended early"
        )
    return BitwiseComparison(run, reference)


def relative_difference(values: Floats, reference: Floats) -> Floats:
    """(values - reference) / reference, signed."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return (values - reference) / reference


def _largest_relative(values: Floats, reference: Floats) -> float:
    apart = np.abs(relative_difference(values, reference))
    neither = (values == reference) | (np.isnan(values) & np.isnan(reference))
    apart = np.where(neither, 0.0, np.where(np.isnan(apart), math.inf, apart))
    return float(np.max(apart, initial=0.0))


SCHEDULE_TOLERANCE = 1e-9
"""Relative. Two machines' cosines may differ in the last bit; two schedules differ by far more."""


@dataclass(frozen=True)
class Aligned:
    """Curves of the same iterations."""

    reference: Curve
    seeds: tuple[Curve, ...]
    """Further runs of the reference, of other seeds."""
    candidates: tuple[Curve, ...]
    notes: tuple[str, ...]


def align(
    reference: Curve,
    *,
    seeds: Sequence[Curve],
    candidates: Sequence[Curve],
    first: int | None = None,
    last: int | None = None,
) -> Aligned:
    """Cut all curves to the iterations `first` to `last` that all of them have.

    All must begin and end at the same iterations: a run that broke off is not passed over in
    silence. Iterations missing in between are left out, with a note. Raises UserError for that,
    and for runs whose batches, tokens or, among the reference and its seeds, schedules differ.
    """
    curves = [_between(curve, first, last) for curve in (reference, *seeds, *candidates)]
    for curve in curves[1:]:
        _check_ends(curve, curves[0])
    common = reduce(np.intersect1d, [curve.iteration for curve in curves])
    notes = [note for curve in curves for note in curve.notes]
    for curve in curves:
        if missing := len(curve) - len(common):
            notes.append(
                f"{curve.name}: {missing} of its {counted(len(curve), 'iteration')} are left out, "
                "because another file lacks them"
            )
    curves = [curve.at(np.searchsorted(curve.iteration, common)) for curve in curves]
    for curve in curves[1:]:
        _check_job(curve, curves[0])
    split = 1 + len(seeds)
    aligned = Aligned(curves[0], tuple(curves[1:split]), tuple(curves[split:]), tuple(notes))
    _check_reference(aligned)
    return aligned


def _between(curve: Curve, first: int | None, last: int | None) -> Curve:
    low = 0 if first is None else first
    high = curve.iteration[-1] if last is None else last
    chosen = np.flatnonzero((curve.iteration >= low) & (curve.iteration <= high))
    if not len(chosen):
        raise UserError(
            f"{curve.name} has no iteration from {low} to {high}; it holds {span(curve)}"
        )
    return curve.at(chosen)


def _check_ends(curve: Curve, reference: Curve) -> None:
    first = max(curve.iteration[0], reference.iteration[0])
    last = min(curve.iteration[-1], reference.iteration[-1])
    if first > last or not len(np.intersect1d(curve.iteration, reference.iteration)):
        raise UserError(
            f"{curve.name} ({span(curve)}) has no iteration in common with {reference.name} "
            f"({span(reference)}); compare runs of the same iterations"
        )
    for flag, value, end, what in (
        ("--from-iteration", first, 0, "begins at"),
        ("--to-iteration", last, -1, "ends at"),
    ):
        if curve.iteration[end] != reference.iteration[end]:
            raise UserError(
                f"{curve.name} {what} iteration {curve.iteration[end]} and {reference.name} at "
                f"{reference.iteration[end]}; if neither broke off, give {flag} {value} to compare "
                "what both have"
            )


def _check_job(curve: Curve, reference: Curve) -> None:
    """Batch and tokens of every iteration, where both files tell them."""
    batches: tuple[tuple[str, Callable[[Curve], Floats]], ...] = (
        ("a global batch of", lambda run: run.batch_size),
        ("consumed tokens of", lambda run: run.consumed_tokens),
    )
    for what, of in batches:
        mine, theirs = of(curve), of(reference)
        differ = np.flatnonzero((mine != theirs) & np.isfinite(mine) & np.isfinite(theirs))
        if len(differ):
            at = differ[0]
            raise UserError(
                f"{curve.name} has {what} {mine[at]:.0f} at iteration {curve.iteration[at]} and "
                f"{reference.name} {theirs[at]:.0f}; only runs that see the same number of tokens "
                "in every iteration can be compared"
            )


def schedule_difference(curve: Curve, reference: Curve) -> tuple[float, int] | None:
    """The largest relative difference of learning rate and weight decay, and its position.

    None where the files do not tell, or where the runs skipped different updates: a skipped update
    holds the schedule back.
    """
    if (curve.skipped != reference.skipped).any():
        return None
    largest: tuple[float, int] | None = None
    for mine, theirs in (
        (curve.learning_rate, reference.learning_rate),
        (curve.weight_decay, reference.weight_decay),
    ):
        known = np.isfinite(mine) & np.isfinite(theirs)
        if not known.any():
            continue
        difference = np.where(mine == theirs, 0.0, np.abs(relative_difference(mine, theirs)))
        at = int(np.argmax(np.where(known, difference, -1.0)))
        if largest is None or difference[at] > largest[0]:
            largest = float(difference[at]), at
    return largest


def _check_reference(aligned: Aligned) -> None:
    """The reference and its seeds must be usable: finite, of one schedule, and not copies."""
    references = (aligned.reference, *aligned.seeds)
    for number, curve in enumerate(references):
        bad = np.flatnonzero(~np.isfinite(curve.loss) | (curve.loss <= 0))
        if len(bad):
            raise UserError(
                f"{curve.name} is to be compared with, but its loss at iteration "
                f"{curve.iteration[bad[0]]} is {curve.loss[bad[0]]:g}; give a run that trained, or "
                "a range of iterations without it"
            )
        found = schedule_difference(curve, aligned.reference)
        if found is not None and found[0] > SCHEDULE_TOLERANCE:
            raise UserError(
                f"{curve.name} is no further seed of {aligned.reference.name}: their learning "
                f"rate or weight decay differ by {found[0]:.2g} at iteration "
                f"{curve.iteration[found[1]]}; give runs that differ in nothing but --seed"
            )
        for other in references[:number]:
            if compare_bitwise(curve, other).losses_identical:
                raise UserError(
                    f"{curve.name} and {other.name} hold the same numbers; give runs of different "
                    "seeds"
                )
