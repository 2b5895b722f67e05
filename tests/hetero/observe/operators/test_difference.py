"""A difference says which tolerance it exceeds, and shows the numbers of that one."""

from __future__ import annotations

import re

import pytest
import torch

from hetero.observe.operators.difference import Difference, Excess, difference, hint
from hetero.observe.operators.sample import take
from hetero.observe.operators.tolerance import Rounding

EXACT = torch.randn(100_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def found(changed: torch.Tensor) -> Difference:
    sides = take(changed.bfloat16(), count=0), take(EXACT, count=0)
    return difference(*sides, rounding=Rounding(roundings=2))


def one_wrong() -> torch.Tensor:
    changed = EXACT.clone()
    changed[7] += 0.5
    return changed


@pytest.mark.parametrize(
    ("changed", "excess"),
    [
        (EXACT, Excess.NONE),
        (one_wrong(), Excess.ELEMENTS),
        (EXACT * 1.003, Excess.FACTOR),
        (EXACT * 1.5, Excess.ERROR),
        (EXACT.flip(0), Excess.ERROR),
    ],
    ids=["right", "one element", "a small factor", "a large factor", "another tensor"],
)
def test_the_tolerance_that_is_exceeded_is_named(changed: torch.Tensor, excess: Excess) -> None:
    assert found(changed).excess is excess
    assert found(changed).passed == (excess is Excess.NONE)


@pytest.mark.parametrize("changed", [EXACT * 1.003, EXACT * 1.5], ids=["factor", "error"])
def test_the_number_shown_exceeds_the_one_allowed(changed: torch.Tensor) -> None:
    shown, allowed = re.findall(r"[\d.]+e-\d+", found(changed).measured())
    assert float(shown) > float(allowed)


def test_of_single_elements_their_share_and_the_worst_are_shown() -> None:
    text = found(one_wrong()).measured()
    assert text.startswith("0.001% of the elements beyond their tolerance")
    worst, allowed = re.findall(r"by ([\d.]+) times, allowed ([\d.]+)", text)[0]
    assert float(worst) > float(allowed)
    assert "in 0.001% of its elements" in hint(found(one_wrong()))
    # The error of all is within its tolerance, and to show it would read as a contradiction.
    assert "error" not in text


def test_what_is_no_number_is_said_and_not_measured() -> None:
    changed = EXACT.clone()
    changed[7] = torch.nan
    assert "1 and 0 of its elements are not finite" in found(changed).measured()
