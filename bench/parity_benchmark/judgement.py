"""Compares the runs of one kind of kernels as tools/compare_loss.py does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bench.parity_benchmark.parity_runs import DETERMINISTIC, Run
from bench.parity_benchmark.side_by_side import Outcome
from hetero.errors import UserError
from hetero.tools.run_comparison.alignment import align
from hetero.tools.run_comparison.comparison import Comparison, Options, Verdict, compare
from hetero.tools.run_comparison.criteria import FEWEST_SEEDS, Finding, parse_criterion
from hetero.tools.run_comparison.curves import Curve, read_curve

FIXED_BOUND = "final-relative"
"""Its bound is a published number, which knows nothing of how noisy these runs are."""
ENVELOPE = "envelope"


@dataclass(frozen=True)
class Judgement:
    """What was found of the runs with one kind of kernels."""

    kernels: str
    comparison: Comparison | None
    same_weights: Mapping[str, bool]
    """By name of the run, of those whose weights must be the reference's."""
    problems: tuple[str, ...]
    """Why something could not be compared."""
    repeats: tuple[str, ...] = ()
    """Names of the runs that are compared to show what the kernels alone do."""

    @property
    def passed(self) -> bool:
        """Whether the mixed runs are right. The reference once more is not judged."""
        judged = [self.passes(v) for v in self._verdicts if v.candidate.name not in self.repeats]
        return bool(judged) and all(judged) and not self.problems

    def passes(self, verdict: Verdict) -> bool:
        """Whether a run that was compared meets all that decides."""
        failed = {f.criterion for f in verdict.findings if f.passed is False}
        if self.noise is not None and _finding(verdict, ENVELOPE).passed:
            failed.discard(FIXED_BOUND)
        return not failed and self.same_weights.get(verdict.candidate.name) is not False

    @property
    def noise(self) -> Finding | None:
        """How the reference once more misses the fixed bound; None where it keeps it.

        A bound that a run misses against itself cannot tell a right run from a wrong one. The
        envelope of the seeds decides then.
        """
        repeats = [v for v in self._verdicts if v.candidate.name in self.repeats]
        findings = [_finding(verdict, FIXED_BOUND) for verdict in repeats]
        return next((finding for finding in findings if finding.passed is False), None)

    def verdict(self, run: Run) -> Verdict | None:
        """None of a run that was not judged."""
        return next((v for v in self._verdicts if v.candidate.name == run.name), None)

    @property
    def _verdicts(self) -> tuple[Verdict, ...]:
        return self.comparison.verdicts if self.comparison else ()

    def as_mapping(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "weights_identical": dict(self.same_weights),
            "problems": list(self.problems),
            "final_relative_decides": self.noise is None,
            "comparison": self.comparison.as_mapping() if self.comparison else None,
        }


def judge(kernels: str, outcomes: Mapping[Run, Outcome]) -> Judgement:
    """Compare what runs with these kernels left; one that failed is left away and said."""
    runs = [run for run in outcomes if run.kernels == kernels]
    good = {run: finished for run in runs if (finished := outcomes[run].finished) is not None}
    problems = [f"{run.name}: {outcomes[run].problem}" for run in runs if run not in good]
    reference = next((run for run in good if run.is_reference), None)
    mixed = [run for run in good if not run.is_homogeneous]
    again = [run for run in good if run.is_again]
    seeds = [run for run in good if run.is_homogeneous and not (run.is_reference or run.is_again)]
    if reference is None or not mixed:
        lacking = "the homogeneous run" if reference is None else "a mixed run"
        problems.append(f"{kernels}: nothing can be compared without {lacking}")
        return Judgement(kernels, None, {}, tuple(problems))
    if 1 + len(seeds) < FEWEST_SEEDS:
        seeds = []
    exact = kernels == DETERMINISTIC
    criteria = (parse_criterion("identical"),) if exact else None
    try:
        aligned = align(
            _curve(outcomes, reference),
            seeds=[_curve(outcomes, run) for run in seeds],
            candidates=[_curve(outcomes, run) for run in (*mixed, *again)],
        )
        comparison = compare(aligned, Options(criteria=criteria, same_seed=True))
    except UserError as error:
        return Judgement(kernels, None, {}, (*problems, f"{kernels}: {error}"))
    weights = {run: finished.report["weights"]["sha256"] for run, finished in good.items()}
    same = {run.name: weights[run] == weights[reference] for run in mixed if exact}
    repeats = tuple(run.name for run in again)
    return Judgement(kernels, comparison, same, tuple(problems), repeats)


def _finding(verdict: Verdict, criterion: str) -> Finding:
    return next(f for f in verdict.findings if f.criterion == criterion)


def _curve(outcomes: Mapping[Run, Outcome], run: Run) -> Curve:
    """By the name of the run, where a file's path would stand."""
    return replace(read_curve(str(outcomes[run].launch.metrics)), name=run.name)
