"""Releases side by side: what is compared with what, and that one bit's difference shows."""

from __future__ import annotations

import math
from dataclasses import replace

from bench.compare_versions import MIXED, Numbers, Trained, verdicts

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


def test_a_run_that_failed_is_equal_to_nothing() -> None:
    other = replace(NEWEST, runs={"PP2": NUMBERS}, failures={MIXED: "rank 1 exited"})
    assert verdicts(other, OLDEST)[MIXED] == "failed"
    assert verdicts(other, OLDEST)["mixed = homogeneous"] == "failed"
    assert verdicts(other, other)[MIXED] == "failed"
