"""Two runs of one job beside each other: every bit of what they computed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hetero.errors import UserError
from hetero.tools.run_comparison.bitwise_comparison import compare_bitwise
from hetero.tools.run_comparison.curves import Curve
from tests.tools.run_comparison.simulated_runs import made_curve, simulated_run, with_loss

ONE = simulated_run(1, iterations=40)


RUN = made_curve([3.0, 2.5], [1.0, None])


def test_the_same_run_twice_is_identical_and_a_bit_is_found_where_it_is() -> None:
    bitwise = compare_bitwise(ONE, simulated_run(1, iterations=40))
    assert bitwise.identical
    assert bitwise.loss_difference == bitwise.relative_losses == 0.0
    assert bitwise.weights_identical is None  # a metrics file does not tell them
    loss = with_loss(ONE, 5, float(np.nextafter(ONE.loss[5], 9)))
    assert np.flatnonzero(~compare_bitwise(loss, ONE).same) == [5]
    # A loss that is no number is the same where both have it.
    overflowed = with_loss(ONE, 3, math.nan)
    assert compare_bitwise(overflowed, overflowed).identical
    assert not compare_bitwise(overflowed, ONE).identical


@pytest.mark.parametrize(
    ("other", "losses", "weights"),
    [
        (made_curve([3.0, 2.5000000000000004], [1.0, None]), False, True),
        (made_curve([3.0, 2.5], [1.0000000000000002, None]), False, True),
        (made_curve([3.0, 2.5], [1.0, None], "b"), True, False),
        (made_curve([3.0, 2.5], [1.0, None], ""), True, None),
    ],
    ids=["a loss", "a gradient norm", "the weights", "weights that are not known"],
)
def test_the_last_bit_counts(other: Curve, losses: bool, weights: bool | None) -> None:
    bitwise = compare_bitwise(other, RUN)
    assert (bitwise.losses_identical, bitwise.weights_identical) == (losses, weights)
    assert bitwise.identical == (losses and weights is not False)


def test_how_far_apart_they_are_is_that_of_the_worst_iteration() -> None:
    bitwise = compare_bitwise(made_curve([3.3, 2.5], [1.0, 1.0]), RUN)
    assert bitwise.loss_difference == pytest.approx(0.3)
    assert bitwise.relative_losses == pytest.approx(0.1)
    assert bitwise.relative_grad_norms == math.inf  # one of them skipped an update


def test_runs_of_different_iterations_cannot_be_compared() -> None:
    with pytest.raises(UserError, match=r"iterations 1 to 1.*iterations 1 to 2"):
        compare_bitwise(made_curve([3.0], [1.0]), RUN)
