"""When the parity benchmark says that a model is the same, and when it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.parity_benchmark.judgement import Judgement, judge
from bench.parity_benchmark.parity_runs import DETERMINISTIC, FAST, Run
from tests.bench.parity_benchmark.made_outcomes import failed, outcome, outcomes

REFERENCE = {kernels: Run(kernels, "homogeneous", 1) for kernels in (DETERMINISTIC, FAST)}
DIRECT = {kernels: Run(kernels, "device-direct", 1) for kernels in (DETERMINISTIC, FAST)}
FORWARD = {kernels: Run(kernels, "cpu-forward", 1) for kernels in (DETERMINISTIC, FAST)}


def failures(judgement: Judgement, run: Run) -> set[str]:
    findings = judgement.verdict(run).findings
    return {finding.criterion for finding in findings if finding.passed is False}


@pytest.mark.parametrize("kernels", [DETERMINISTIC, FAST])
def test_the_same_numbers_pass(tmp_path: Path, kernels: str) -> None:
    """Default kernels are judged by every default criterion."""
    judgement = judge(kernels, outcomes(tmp_path, kernels))
    assert judgement.passed
    assert not judgement.problems
    assert judgement.verdict(REFERENCE[kernels]) is None
    verdict = judgement.verdict(DIRECT[kernels])
    if kernels == FAST:
        assert {finding.criterion for finding in verdict.findings} == {
            *("finite", "schedule", "first-steps", "first-grad-norms", "final-relative"),
            *("envelope", "grad-norm-envelope"),
        }
    assert {finding.passed for finding in verdict.findings} == {True}
    record = json.loads(json.dumps(judgement.as_mapping()))
    assert record["passed"] is True
    assert record["comparison"]["reference"] == f"{kernels}, homogeneous, seed 1"


@pytest.mark.parametrize(
    ("kernels", "factor", "fails"),
    [
        (DETERMINISTIC, 1 + 2**-50, {"identical"}),
        (FAST, 1 + 2**-50, set()),
        (FAST, 1.05, {"final-relative", "first-steps", "envelope"}),
    ],
)
def test_deterministic_kernels_are_compared_bit_for_bit(
    tmp_path: Path, kernels: str, factor: float, fails: set[str]
) -> None:
    good = outcomes(tmp_path, kernels)
    good[DIRECT[kernels]] = outcome(tmp_path, DIRECT[kernels], factor=factor)
    judgement = judge(kernels, good)
    assert judgement.passed is (not fails)
    assert failures(judgement, DIRECT[kernels]) == fails
    assert failures(judgement, FORWARD[kernels]) == set()


AGAIN = Run(FAST, "homogeneous", 1, is_again=True)


def test_the_reference_once_more_is_shown_and_not_judged(tmp_path: Path) -> None:
    good = outcomes(tmp_path, FAST)
    good[AGAIN] = outcome(tmp_path, AGAIN, broken_from=30)
    judgement = judge(FAST, good)
    assert judgement.passed
    assert failures(judgement, AGAIN) >= {"finite"}


def test_a_bound_that_the_reference_misses_against_itself_decides_nothing(tmp_path: Path) -> None:
    good = outcomes(tmp_path, FAST)
    good[AGAIN] = outcome(tmp_path, AGAIN, factor=1.02, changed_after=10)
    seeds = [Run(FAST, "homogeneous", seed) for seed in (2, 3)]
    for seed, factor in zip(seeds, (0.97, 1.03), strict=True):
        good[seed] = outcome(tmp_path, seed, factor=factor)
    good[DIRECT[FAST]] = outcome(tmp_path, DIRECT[FAST], factor=1.01, changed_after=10)
    judgement = judge(FAST, good)
    assert judgement.noise is not None
    assert failures(judgement, DIRECT[FAST]) == {"final-relative"}
    assert judgement.passed
    # What lies outside the envelope too is wrong, however noisy the runs are.
    good[DIRECT[FAST]] = outcome(tmp_path, DIRECT[FAST], factor=1.5, changed_after=10)
    assert not judge(FAST, good).passed


def test_without_an_envelope_the_bound_decides_however_noisy_the_runs_are(tmp_path: Path) -> None:
    good = outcomes(tmp_path, FAST)
    good[AGAIN] = outcome(tmp_path, AGAIN, factor=1.02, changed_after=10)
    good[DIRECT[FAST]] = outcome(tmp_path, DIRECT[FAST], factor=1.01, changed_after=10)
    seed = Run(FAST, "homogeneous", 3)
    good[seed] = failed(good[seed], "no memory")
    judgement = judge(FAST, good)
    assert not judgement.passed
    direct, forward = judgement.verdict(DIRECT[FAST]), judgement.verdict(FORWARD[FAST])
    assert not judgement.passes(direct)
    assert judgement.passes(forward)
    applied = {f.criterion: f.passed for f in forward.findings}
    assert (applied["envelope"], applied["final-relative"]) == (None, True)


@pytest.mark.parametrize(
    ("lacking", "what"),
    [(("homogeneous",), "the homogeneous run"), (("device-direct", "cpu-forward"), "a mixed run")],
)
def test_with_nothing_to_compare_it_fails_and_says_so(
    tmp_path: Path, lacking: tuple[str, ...], what: str
) -> None:
    good = {
        run: failed(was, "broke") if run.transport in lacking else was
        for run, was in outcomes(tmp_path, DETERMINISTIC).items()
    }
    judgement = judge(DETERMINISTIC, good)
    assert not judgement.passed
    assert judgement.problems[-1] == f"deterministic: nothing can be compared without {what}"


def test_runs_that_cannot_be_compared_are_said_to_be_so(tmp_path: Path) -> None:
    """One that an exit flag ended early, so that it holds fewer iterations."""
    good = outcomes(tmp_path, FAST)
    metrics = good[DIRECT[FAST]].launch.metrics
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-3]))
    judgement = judge(FAST, good)
    assert not judgement.passed
    assert "fast, device-direct, seed 1 ends at iteration 37" in judgement.problems[0]
