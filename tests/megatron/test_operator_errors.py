"""Errors of operators in the log's line."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hetero.observe.operators.difference import Difference, incomparable
from hetero.observe.operators.tolerance import Rounding, tolerance
from megatron.hetero.operator_errors import OperatorErrors, summary

LIMITS = tolerance(torch.bfloat16, Rounding(roundings=2), elements=1000)
RIGHT = Difference(
    max_abs=0.1,
    max_rel=0.1,
    error=0.5 * LIMITS.error,
    factor=1.0,
    beyond=0.0,
    worst=0.9,
    problem="",
    limits=LIMITS,
)


def line(*found: Difference) -> str:
    errors = OperatorErrors()
    for each in found:
        errors.add("linear", each)
    return summary([errors.numbers])


@pytest.mark.parametrize(
    ("found", "end"),
    [
        (RIGHT, ""),
        (replace(RIGHT, beyond=0.001, worst=30.0), " WRONG in single elements"),
        (replace(RIGHT, factor=1.0 + 2 * LIMITS.drift), " WRONG by a common factor"),
        (replace(RIGHT, error=2 * LIMITS.error), " WRONG"),
        (incomparable("no number", LIMITS), " WRONG"),
    ],
)
def test_an_error_within_its_limit_is_only_called_wrong_with_the_reason(
    found: Difference, end: str
) -> None:
    assert line(found).endswith(f" of {LIMITS.error:.1e}{end}")
    # Another operator of the kind that is right changes nothing of that.
    assert line(found, RIGHT).endswith(f" of {LIMITS.error:.1e}{end}")


def test_what_no_rank_has_compared_is_not_shown() -> None:
    assert summary([OperatorErrors().numbers] * 2) == ""
