"""How far predictions are from what was measured, and whether they put runs in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from bench.planner_validation.recorded_runs import Record


@dataclass(frozen=True)
class Score:
    runs: int
    mean_error: float
    largest_error: float
    kendall_tau: float
    """Of throughput, samples a second: of all pairs, those in the same order less those not."""

    def __str__(self) -> str:
        return (
            f"{self.runs} runs, mean error {100 * self.mean_error:.1f} %, largest "
            f"{100 * self.largest_error:.1f} %, Kendall tau {self.kendall_tau:.2f}"
        )


def score(records: Sequence[Record], predicted: Mapping[str, float]) -> Score:
    """Of the records that are not damaged."""
    sound = [record for record in records if not record.damage]
    return score_of(
        [
            (record.global_batch / record.seconds, record.global_batch / predicted[record.name])
            for record in sound
        ]
    )


def score_of(rates: Sequence[tuple[float, float]]) -> Score:
    """Of throughputs as measured and as predicted; their errors are those of seconds."""
    errors = [abs(measured / predicted - 1) for measured, predicted in rates]
    return Score(len(rates), sum(errors) / len(errors), max(errors), kendall_tau(rates))


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Tau-a; a tie on either side counts for neither."""
    return _agreement(list(combinations(pairs, 2)))


def separable_kendall_tau(runs: Sequence[tuple[Sequence[float], float]]) -> tuple[float, int]:
    """Tau of steps as measured, several times each, and as predicted; and of how many pairs.

    Of those pairs alone whose measurements do not overlap: which of two others is the shorter one
    was not measured.
    """
    pairs = [
        ((max(one), ours), (max(other), theirs))
        for (one, ours), (other, theirs) in combinations(runs, 2)
        if max(one) < min(other) or max(other) < min(one)
    ]
    return _agreement(pairs), len(pairs)


def _agreement(pairs: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> float:
    agreed = [(one[0] - other[0]) * (one[1] - other[1]) for one, other in pairs]
    if not agreed:
        return 1.0
    return sum((value > 0) - (value < 0) for value in agreed) / len(agreed)
