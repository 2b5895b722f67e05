"""Compares candidates with a reference and its seeds: everything but reading and writing files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hetero.errors import UserError
from hetero.text import counted
from hetero.tools.run_comparison.alignment import Aligned
from hetero.tools.run_comparison.criteria import (
    DEFAULT_CRITERIA,
    RULES,
    Criterion,
    Envelope,
    Finding,
    Pair,
    check_seeds,
    finite,
    has_same_initial_loss,
    judge,
    not_applied,
    seed_envelope,
)
from hetero.tools.run_comparison.curves import (
    Curve,
    default_window,
    has_grad_norm,
    smoothed_grad_norm,
    smoothed_iterations,
    smoothed_loss,
)

DEFAULT_FIRST = 10


@dataclass(frozen=True)
class Options:
    """How to compare."""

    criteria: tuple[Criterion, ...] | None = None
    """None takes those of the defaults that the files allow."""
    window: int | None = None
    """Iterations of a smoothed point; None takes a tenth of them, at most 200."""
    first: int = DEFAULT_FIRST
    """Iterations that `first-steps` and `first-grad-norms` look at."""
    same_seed: bool | None = None
    """Whether candidates ran with the reference's seed; None sees it from the first loss."""


@dataclass(frozen=True)
class Verdict:
    """All that was found of one candidate."""

    candidate: Curve
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return all(finding.passed is not False for finding in self.findings)


@dataclass(frozen=True)
class Comparison:
    """Candidates beside their reference."""

    aligned: Aligned
    window: int
    envelopes: Mapping[str, Envelope]
    """Of `loss` and `grad_norm`; empty without seeds."""
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)

    @property
    def simulated(self) -> bool:
        runs = (self.aligned.reference, *self.aligned.seeds, *self.aligned.candidates)
        return any(run.simulated for run in runs)

    def as_mapping(self) -> dict[str, Any]:
        """What `compare_loss.json` holds; null is what is not a number."""
        reference = self.aligned.reference
        return {
            "passed": self.passed,
            "simulated": self.simulated,
            "reference": reference.name,
            "seeds": [seed.name for seed in self.aligned.seeds],
            "first_iteration": int(reference.iteration[0]),
            "last_iteration": int(reference.iteration[-1]),
            "iterations": len(reference),
            "smoothed_over": self.window,
            "notes": list(self.notes),
            "candidates": [
                {
                    "name": verdict.candidate.name,
                    "passed": verdict.passed,
                    "findings": [_finding_mapping(finding) for finding in verdict.findings],
                }
                for verdict in self.verdicts
            ],
        }


def _finding_mapping(finding: Finding) -> dict[str, Any]:
    value = finding.value
    known = value is not None and math.isfinite(value)
    return {**asdict(finding), "value": value if known else None}


def compare(aligned: Aligned, options: Options) -> Comparison:
    """Judge every candidate. Raises UserError where a named criterion cannot be applied."""
    criteria = options.criteria
    if criteria is not None:
        check_seeds(criteria, 1 + len(aligned.seeds))
    elif aligned.seeds:
        check_seeds((Criterion("envelope", 1.0),), 1 + len(aligned.seeds))
    iterations = len(aligned.reference)
    window = options.window or default_window(iterations)
    if window > iterations:
        raise UserError(
            f"--smooth {window} is more than the {counted(iterations, 'iteration')} that are "
            "compared"
        )
    envelopes = _envelopes(aligned, window)
    verdicts = tuple(
        _verdict(
            Pair(aligned.reference, candidate, window, options.first, envelopes),
            options,
        )
        for candidate in aligned.candidates
    )
    notes = (*aligned.notes, *_skipped_notes(aligned), *_seed_notes(aligned, window, verdicts))
    return Comparison(aligned, window, envelopes, verdicts, notes)


def _envelopes(aligned: Aligned, window: int) -> dict[str, Envelope]:
    runs = (aligned.reference, *aligned.seeds)
    if not aligned.seeds:
        return {}
    iteration = smoothed_iterations(aligned.reference, window)
    losses = np.stack([smoothed_loss(run, window) for run in runs])
    envelopes = {"loss": seed_envelope(losses, iteration)}
    norms = np.stack([smoothed_grad_norm(run, window) for run in runs])
    if np.isfinite(norms).all() and (norms > 0).all():
        envelopes["grad_norm"] = seed_envelope(norms, iteration)
    return envelopes


def _verdict(pair: Pair, options: Options) -> Verdict:
    findings = [finite(pair)]
    named = options.criteria is not None
    criteria = options.criteria or tuple(
        Criterion(name, RULES[name][0]) for name in DEFAULT_CRITERIA
    )
    for criterion in criteria:
        obstacle = _inapplicable_reason(pair, criterion, options.same_seed, named=named)
        finding = not_applied(criterion, obstacle) if obstacle else judge(pair, criterion)
        if named and finding.passed is None:
            raise UserError(f"--criteria {criterion.name} cannot be applied: {finding.detail}")
        if criterion.needs_same_seed and finding.passed is False and options.same_seed is None:
            advice = "if the candidate ran with another seed, say --other-seed"
            finding = replace(finding, detail=f"{finding.detail}; {advice}")
        findings.append(finding)
    return Verdict(pair.candidate, tuple(findings))


def _inapplicable_reason(
    pair: Pair, criterion: Criterion, same_seed: bool | None, *, named: bool
) -> str | None:
    """Why a criterion says nothing of this candidate."""
    if criterion.needs_seeds and "loss" not in pair.envelopes:
        return "no seeds were given; run the reference with two more seeds and give --seeds"
    if criterion.name == "grad-norm-envelope" and "grad_norm" not in pair.envelopes:
        return "the reference or its seeds have gradient norms that are missing or not above 0"
    if criterion.needs_grad_norm and not has_grad_norm(pair.reference):
        return "the reference's file holds no gradient norms"
    if not criterion.needs_same_seed or same_seed or named:
        return None
    if same_seed is False:
        return "the candidate ran with another seed, as --other-seed says"
    if has_same_initial_loss(pair.reference, pair.candidate):
        return None
    return (
        "the first losses differ by more than rounding: another seed, or wrong from the start; "
        "--same-seed applies it"
    )


def _seed_notes(aligned: Aligned, window: int, verdicts: Sequence[Verdict]) -> list[str]:
    """Say so where the reference's own seeds end further apart than candidates may."""
    bounds = [
        finding.bound
        for verdict in verdicts
        for finding in verdict.findings
        if finding.criterion == "final-relative" and finding.bound is not None
    ]
    ends = [abs(_final_difference(seed, aligned.reference, window)) for seed in aligned.seeds]
    if not bounds or not ends or max(ends) <= bounds[0]:
        return []
    return [
        f"the seeds themselves end up to {max(ends):.2g} from the reference, so that a right run "
        f"may fail final-relative={bounds[0]:g}: these runs are too short or too noisy for it"
    ]


def _final_difference(run: Curve, reference: Curve, window: int) -> float:
    return float(run.loss[-window:].mean() / reference.loss[-window:].mean() - 1.0)


def _skipped_notes(aligned: Aligned) -> list[str]:
    expected = int(aligned.reference.skipped.sum())
    return [
        f"{run.name} skipped {int(run.skipped.sum())} updates, {aligned.reference.name} {expected}"
        for run in (*aligned.seeds, *aligned.candidates)
        if int(run.skipped.sum()) != expected
    ]
