"""What the default criteria say of simulated runs, right ones and wrong ones.

Each figure is a share of repetitions with fixed random numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hetero.errors import UserError
from hetero.tools.run_comparison.alignment import align
from hetero.tools.run_comparison.comparison import Comparison, Options, compare
from hetero.tools.run_comparison.criteria import parse_criterion
from hetero.tools.run_comparison.curves import Curve
from tests.tools.run_comparison.simulated_runs import Fault, Noise, simulated_run, with_loss

ITERATIONS = 400
REPETITIONS = 60

ROUNDED = 1e-3
"""How far a right run on other kernels ends from the reference, relative to the loss."""

Candidate = Callable[[int, Noise], Curve]


def same_seed(fault: Fault | None = None) -> Candidate:
    return lambda seed, noise: simulated_run(
        seed, iterations=ITERATIONS, noise=noise, fault=fault, rounding=ROUNDED
    )


def further_seed(fault: Fault | None = None) -> Candidate:
    return lambda seed, noise: simulated_run(
        seed + 99, iterations=ITERATIONS, noise=noise, fault=fault
    )


def accepted(candidate: Candidate, *, noise: Noise | None = None, seeds: int = 3, **how) -> float:
    """The share of repetitions in which a candidate passes."""
    noise = noise or Noise()
    passed = 0
    for repetition in range(REPETITIONS):
        base = 1000 * repetition
        runs = [
            simulated_run(base + number, iterations=ITERATIONS, noise=noise)
            for number in range(seeds)
        ]
        aligned = align(runs[0], seeds=runs[1:], candidates=[candidate(base, noise)])
        passed += compare(aligned, Options(**how)).passed
    return passed / REPETITIONS


ENVELOPES = (parse_criterion("envelope"), parse_criterion("grad-norm-envelope"))


@pytest.mark.parametrize("seeds", [3, 5])
def test_a_right_run_passes_and_that_of_a_further_seed_nearly_always(seeds):
    assert accepted(same_seed(), seeds=seeds) == 1.0
    assert accepted(further_seed(), seeds=seeds, same_seed=False) >= 0.97


@pytest.mark.parametrize(
    "noise",
    [
        Noise(level=0.0),
        Noise(level=0.01),
        Noise(level=0.01, memory=0.02),
        Noise(level=0.01, memory=math.inf),
        Noise(batch=0.05, grad_norm=0.5),
    ],
    ids=["no-levels", "levels-drift", "levels-drift-fast", "levels-persist", "noisy"],
)
def test_the_envelopes_nearly_always_take_a_further_seed_whatever_the_noise(noise):
    assert accepted(further_seed(), noise=noise, criteria=ENVELOPES) >= 0.97


FAULTS = {
    "a learning rate 10 % too high": Fault(rate=1.1),
    "a learning rate 10 % too low": Fault(rate=0.9),
    "one of two stages' gradients doubled": Fault(grad_norm=math.sqrt(2.5)),
    "one of eight stages' gradients doubled": Fault(grad_norm=math.sqrt(11 / 8)),
    "a level 3 % off from half of the run on": Fault(level=1.03, level_from=0.5),
    "a loss 3 % too low": Fault(level=0.97),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_wrong_run_fails_and_that_of_a_further_seed_nearly_always(fault):
    assert accepted(same_seed(fault)) == 0.0
    assert accepted(further_seed(fault), seeds=5, same_seed=False) <= 0.05


def judged(candidate: Curve, reference: Curve | None = None, **how) -> Comparison:
    """Without further seeds."""
    aligned = align(reference or simulated_run(1), seeds=[], candidates=[candidate])
    return compare(aligned, Options(**how))


def unused(comparison: Comparison) -> list[str]:
    return [f.criterion for f in comparison.verdicts[0].findings if f.passed is None]


def test_without_seeds_the_envelopes_are_not_applied_and_the_reason_is_given():
    comparison = judged(simulated_run(1, rounding=ROUNDED))
    assert comparison.passed
    assert unused(comparison) == ["envelope", "grad-norm-envelope"]
    assert "give --seeds" in comparison.verdicts[0].findings[-1].detail


@pytest.mark.parametrize(
    ("candidate", "same_seed", "applied"),
    [(1, None, True), (2, None, False), (1, False, False), (2, True, True)],
)
def test_first_steps_are_asked_of_a_run_that_starts_as_the_reference_or_is_said_to(
    candidate, same_seed, applied
):
    comparison = judged(simulated_run(candidate, rounding=ROUNDED), same_seed=same_seed)
    assert ("first-steps" not in unused(comparison)) is applied
    assert comparison.passed is (applied <= (candidate == 1))


def test_a_first_loss_that_agrees_by_chance_is_a_failure_that_names_the_way_out():
    comparison = judged(with_loss(simulated_run(2), 0, simulated_run(1).loss[0]))
    detail = {f.criterion: f.detail for f in comparison.verdicts[0].findings}["first-steps"]
    assert "if the candidate ran with another seed, say --other-seed" in detail


def test_seeds_that_end_further_apart_than_candidates_may_are_said():
    runs = [simulated_run(seed, noise=Noise(level=0.05, memory=math.inf)) for seed in (1, 2, 3)]
    comparison = compare(align(runs[0], seeds=runs[1:], candidates=[runs[0]]), Options())
    assert "the seeds themselves end up to" in comparison.notes[-1]
    close = [simulated_run(seed, noise=Noise(level=0.0)) for seed in (1, 2, 3)]
    assert compare(align(close[0], seeds=close[1:], candidates=[close[0]]), Options()).notes == ()


def test_a_named_criterion_that_the_files_do_not_allow_is_refused():
    columns = ("grad_norm", "learning_rate", "weight_decay")
    silent = replace(simulated_run(1), **dict.fromkeys(columns, np.full(1000, np.nan)))
    for name in ("first-grad-norms", "schedule"):
        with pytest.raises(UserError, match=f"--criteria {name} cannot be applied"):
            judged(silent, silent, criteria=(parse_criterion(name),))
    comparison = judged(silent, silent)
    assert comparison.passed
    assert {"first-grad-norms", "schedule"} <= set(unused(comparison))


def test_updates_that_only_one_run_skipped_are_said_and_a_run_that_diverged_is_json():
    comparison = judged(replace(simulated_run(1), skipped=np.arange(1000) < 4))
    assert comparison.notes == ("seed1 skipped 4 updates, seed1 0",)
    assert "schedule" in unused(comparison)
    diverged = judged(with_loss(simulated_run(1), 999, np.nan))
    mapping = json.loads(json.dumps(diverged.as_mapping(), allow_nan=False))
    assert (mapping["passed"], mapping["iterations"]) == (False, 1000)
    (candidate,) = mapping["candidates"]
    (final,) = [f for f in candidate["findings"] if f["criterion"] == "final-relative"]
    assert (final["value"], final["passed"]) == (None, False)
