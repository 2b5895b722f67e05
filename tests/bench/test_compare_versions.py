"""Releases side by side: what is compared with what, and that one bit's difference shows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench.compare_versions import MIXED, Numbers, Trained, reference_of, render, verdicts

NUMBERS = Numbers(losses=(5.5, 5.25), grad_norms=(1.0, 0.5), weights="ab")
NEXT = replace(NUMBERS, losses=(5.5, math.nextafter(5.25, 6)))
LAYOUTS = ("one rank", "PP2", MIXED)
OLDEST = Trained(
    release="0.16.1",
    python="3.12.1",
    torch="2.13.0+cu130",
    runs=dict.fromkeys(LAYOUTS, NUMBERS),
    failures={},
)
NEWEST = replace(OLDEST, release="0.19.0")


def test_equal_bits_are_equal_and_the_next_number_is_not() -> None:
    assert verdicts(NEWEST, OLDEST) == dict.fromkeys((*LAYOUTS, "mixed = homogeneous"), "equal")
    other = replace(NEWEST, runs={**NEWEST.runs, MIXED: NEXT})
    said = verdicts(other, OLDEST)
    assert said["PP2"] == "equal"
    assert said[MIXED] == said["mixed = homogeneous"] == "differs by 1.7e-16"


def test_other_weights_differ_though_losses_are_equal() -> None:
    other = replace(NEWEST, runs={"one rank": replace(NUMBERS, weights="cd")})
    assert verdicts(other, OLDEST) == {"one rank": "weights differ"}


def test_a_run_that_failed_is_equal_to_nothing() -> None:
    other = replace(NEWEST, runs={"PP2": NUMBERS}, failures={MIXED: "rank 1 exited"})
    assert verdicts(other, OLDEST)[MIXED] == "failed"
    assert verdicts(other, OLDEST)["mixed = homogeneous"] == "failed"
    assert verdicts(other, other)[MIXED] == "failed"


@pytest.mark.parametrize(
    ("python", "torch", "expected"),
    [
        ("3.12.1", "2.13.0+cu130", "3.12.1"),
        ("3.13.0", "2.13.0+cu130", "3.12.1"),
        ("3.13.0", "2.14.0", "3.11.7"),
    ],
    ids=["the same Python", "the same torch", "neither"],
)
def test_the_reference_is_the_oldest_release_on_the_nearest_python(
    python: str, torch: str, expected: str
) -> None:
    first = replace(OLDEST, python="3.11.7", torch="2.13.0+cpu")
    one = replace(NEWEST, python=python, torch=torch)
    assert reference_of(one, [first, OLDEST, one]).python == expected


def test_the_table_names_what_each_row_is_compared_with() -> None:
    first, second = render([OLDEST, NEWEST]).splitlines()[2:]
    assert "| reference |" in first
    assert second.endswith("| equal | 0.16.1 on 3.12.1 |")
