"""The table of faults: what counts as right, and that each fault can be put into a run."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from bench import fault_table
from bench.faults.injected import FAULTS, Fault
from bench.faults.inside import ON_ALL, ON_ONE

FAULT = Fault(name="stopped", says=r"rank 1 on \S+ is stopped")


class Ended:
    """A run that has ended, in place of one that takes half a minute."""

    folder = Path("/tmp/none")

    def __init__(self, *lines: tuple[float, str]) -> None:
        self.lines = list(lines)
        self.launchers = [self]

    def has_ended(self) -> bool:
        return True

    def poll(self) -> None:
        return None


def outcome(*lines: tuple[float, str]) -> fault_table.Outcome:
    """Of a fault that began at 100.0."""
    begun = time.monotonic()
    moved = [(when - 100.0 + begun, line) for when, line in lines]
    return fault_table._outcome(FAULT, Ended(*moved), begun, within=15.0)  # type: ignore[arg-type]


def test_a_fault_is_right_where_its_rank_and_cause_are_told_in_time() -> None:
    found = outcome(
        (90.0, "warning: rank 1 on b is stopped"), (106.0, "warning: rank 1 on b is stopped")
    )
    assert (found.right, found.seconds) == (True, 6.0)


@pytest.mark.parametrize(
    "lines",
    [
        [(116.0, "warning: rank 1 on b is stopped")],
        [(106.0, "warning: rank 1 on b is in its loader")],
        [
            (105.0, "warning: no progress for 5 s: rank 0 on a is stopped"),
            (106.0, "warning: rank 1 on b is stopped"),
        ],
        [],
    ],
    ids=["late", "another cause", "another rank before", "nothing"],
)
def test_a_fault_is_wrong_where_it_is_told_late_or_of_others(lines) -> None:
    assert not outcome(*lines).right


def test_every_fault_has_a_name_of_its_own_and_is_one_that_can_be_put() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert fault.act is not None or fault.inside in {*ON_ONE, *ON_ALL}
        assert fault.inside in {"", *ON_ONE, *ON_ALL}
        re.compile(fault.says)


def test_the_results_of_the_page_are_of_these_faults() -> None:
    results = Path(fault_table.__file__).parent / "results"
    (file,) = results.glob("*_faults_2-core-CPU.json")
    assert list(json.loads(file.read_text())["faults"]) == [fault.name for fault in FAULTS]
