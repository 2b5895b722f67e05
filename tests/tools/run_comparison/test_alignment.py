"""Runs side by side: the same job or a refusal, and the same bits or how far apart."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hetero.errors import UserError
from hetero.tools.run_comparison.alignment import align, compare_bitwise, schedule_difference
from hetero.tools.run_comparison.curves import Curve
from tests.sentences import sentence_of
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


def run(seed: int, iterations: int = 40) -> Curve:
    return simulated_run(seed, iterations=iterations)


def part(curve: Curve, keep: list[int]) -> Curve:
    return curve.at(np.array(keep))


def test_all_runs_are_cut_to_the_range_asked_for():
    aligned = align(run(1), seeds=[run(2)], candidates=[run(3)], first=11, last=30)
    for curve in (aligned.reference, *aligned.seeds, *aligned.candidates):
        assert curve.iteration.tolist() == list(range(11, 31))
    assert aligned.candidates[0].loss.tolist() == run(3).loss[10:30].tolist()
    assert aligned.notes == ()


def test_iterations_that_one_run_lacks_are_left_out_of_all_with_a_note():
    aligned = align(run(1, 5), seeds=[], candidates=[part(run(2, 5), [0, 1, 3, 4])])
    assert aligned.reference.iteration.tolist() == [1, 2, 4, 5]
    assert "seed1: 1 of its 5 iterations are left out" in aligned.notes[0]


def test_a_run_that_lacks_the_end_or_the_start_is_refused_unless_the_range_is_given():
    whole, broken = run(1), part(run(2), list(range(25)))
    said = sentence_of(align, whole, seeds=[], candidates=[broken])
    assert "seed2 ends at iteration 25 and seed1 at 40; " in said
    assert "give --to-iteration 25" in said
    assert len(align(whole, seeds=[], candidates=[broken], last=25).reference) == 25
    with pytest.raises(UserError, match="give --from-iteration 11"):
        align(whole, seeds=[], candidates=[part(run(2), list(range(10, 40)))])
    with pytest.raises(UserError, match=r"no iteration from 50 to 60; it holds .*1 to 40"):
        align(whole, seeds=[], candidates=[run(2)], first=50, last=60)


@pytest.mark.parametrize(
    ("one", "other"),
    [(range(10), range(10, 40)), (range(0, 40, 2), range(1, 40, 2))],
    ids=["one after the other", "every second"],
)
def test_runs_without_a_common_iteration_are_refused(one, other):
    runs = part(run(1), list(one)), part(run(2), list(other))
    assert "no iteration in common" in sentence_of(align, runs[0], seeds=[], candidates=[runs[1]])


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ("batch_size", "a global batch of 16 at iteration 7 and seed1 8"),
        ("consumed_tokens", "consumed tokens of 3584 at iteration 7 and seed1 1792"),
    ],
)
def test_runs_that_see_other_numbers_of_tokens_are_refused(column, says):
    values = getattr(run(2), column).copy()
    values[6:] *= 2
    with pytest.raises(UserError, match=says):
        align(run(1), seeds=[], candidates=[replace(run(2), **{column: values})])


def test_files_that_do_not_tell_the_batch_are_taken():
    silent = replace(run(2), batch_size=np.full(40, np.nan), consumed_tokens=np.full(40, np.nan))
    assert len(align(run(1), seeds=[], candidates=[silent]).reference) == 40


@pytest.mark.parametrize("loss", [np.nan, np.inf, 0.0, -1.0])
def test_a_reference_or_a_seed_of_unusable_losses_is_refused(loss):
    bad = with_loss(run(2), 3, loss)
    for reference, seeds in ((bad, []), (run(1), [bad])):
        said = sentence_of(align, reference, seeds=seeds, candidates=[run(3)])
        assert "its loss at iteration 4 is" in said
    assert align(run(1), seeds=[], candidates=[bad]).candidates[0].name == "seed2"


def test_seeds_that_are_copies_or_of_another_learning_rate_are_refused():
    with pytest.raises(UserError, match="other and seed1 hold the same numbers"):
        align(run(1), seeds=[replace(run(1), name="other")], candidates=[run(3)])
    assert align(run(1), seeds=[], candidates=[run(1)]).candidates
    other = replace(run(2), learning_rate=run(2).learning_rate * 1.1)
    with pytest.raises(UserError, match=r"seed2 is no further seed of seed1: .* by 0.1 "):
        align(run(1), seeds=[other], candidates=[run(3)])


def test_the_schedules_are_compared_as_far_as_the_files_tell_and_the_updates_agree():
    one, other = run(1), run(2)
    assert schedule_difference(one, other) is not None
    assert schedule_difference(one, other)[0] == 0.0
    decay = other.weight_decay.copy()
    decay[20] = 0.11
    found = schedule_difference(replace(other, weight_decay=decay), one)
    assert found == (pytest.approx(0.1), 20)
    skipped = other.skipped.copy()
    skipped[3] = True
    assert schedule_difference(replace(other, skipped=skipped), one) is None
    unknown = np.full(40, np.nan)
    silent = replace(other, learning_rate=unknown, weight_decay=unknown)
    assert schedule_difference(silent, one) is None
