"""Puts the curves of several runs side by side, and refuses runs that were not the same job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from hetero.errors import UserError
from hetero.text import counted
from hetero.tools.run_comparison.bitwise_comparison import compare_bitwise, relative_difference
from hetero.tools.run_comparison.curves import Curve, Floats, span

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
