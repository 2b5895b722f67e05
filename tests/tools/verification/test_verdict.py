"""What is marked as different from simulated vendors."""

from __future__ import annotations

import json
from pathlib import Path

from hetero.tools.verification.steps import NAMES
from hetero.tools.verification.verdict import (
    EXPECTED,
    Difference,
    Outcome,
    Verdict,
    add_expected,
    differences,
    read_expected,
)


def verdict(results: dict[str, str], figures: dict[str, float] | None = None) -> Verdict:
    return Verdict("links", Outcome.PASSED, "", results=results, figures=figures or {})


def test_what_was_seen_is_no_difference_and_all_else_has_both_values(tmp_path: Path) -> None:
    file = tmp_path / "simulated.json"
    add_expected(file, [verdict({"ipc": "not there"}, {"tcp": 0.5})])
    add_expected(file, [verdict({"ipc": "kept"}, {"tcp": 0.8})])
    expected = read_expected(file)
    assert differences([verdict({"ipc": "kept"}, {"tcp": 1.9})], expected) == []
    seen = differences([verdict({"ipc": "broken", "verbs": "kept"}, {"tcp": 0.1})], expected)
    assert seen == [
        Difference("links", "ipc", "broken", "not there or kept"),
        Difference("links", "verbs", "kept", "never seen"),
        Difference("links", "tcp", "0.1", "0.5 to 0.8"),
    ]


def test_what_failed_is_not_expected_later(tmp_path: Path) -> None:
    file = tmp_path / "simulated.json"
    add_expected(file, [Verdict("links", Outcome.FAILED, "", results={"ipc": "broken"})])
    assert json.loads(file.read_text()) == {}


def test_every_step_has_expected_outcomes_in_the_package() -> None:
    assert list(read_expected(EXPECTED)) == sorted(NAMES)
