"""Whether two runs of one job computed the same, bit for bit, and how far apart they are if not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetero.errors import UserError
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
