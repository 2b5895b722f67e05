"""What a step of `hetero verify` came to, and what of it differs from simulated vendors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from hetero.tools.reports.page import write_whole


class Outcome(StrEnum):
    """How a step ended."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    NOT_RUN = "not run"
    """Something that it needs is not there; that is no pass."""
    SKIPPED = "skipped"
    """By --only or --skip."""


@dataclass(frozen=True)
class Failure:
    """One thing that is not as it has to be."""

    expected: str
    seen: str
    remedy: str


@dataclass(frozen=True)
class Verdict:
    """What one step came to."""

    step: str
    outcome: Outcome
    summary: str
    seconds: float = 0.0
    failures: tuple[Failure, ...] = ()
    results: Mapping[str, str] = field(default_factory=dict)
    """Everything that was checked and what it came to, in words without numbers that vary."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What does not depend on a machine's size: ratios, errors, seconds of a deadline."""
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.outcome is Outcome.PASSED

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Verdict:
        return cls(
            **{
                **record,
                "outcome": Outcome(record["outcome"]),
                "failures": tuple(Failure(**failure) for failure in record["failures"]),
                "notes": tuple(record["notes"]),
            }
        )


def judged(
    step: str,
    failures: Sequence[Failure],
    *,
    passed: str,
    results: Mapping[str, str],
    figures: Mapping[str, float] | None = None,
    notes: Sequence[str] = (),
) -> Verdict:
    """A step that ran to its end; it has passed where nothing failed. `passed` is said then."""
    first = failures[0].seen.partition("\n")[0] if failures else ""
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return Verdict(
        step=step,
        outcome=Outcome.FAILED if failures else Outcome.PASSED,
        summary=f"{first}{more}" if failures else passed,
        failures=tuple(failures),
        results=dict(results),
        figures=dict(figures or {}),
        notes=tuple(notes),
    )


EXPECTED = Path(__file__).with_name("simulated.json")
"""Made by `hetero verify ... --add-to-simulated FILE`, once for every kind of machine."""
_FACTOR, _ROUNDING = 3.0, 1e-12
"""A figure counts as another one beyond so many times what was seen."""


@dataclass(frozen=True)
class Difference:
    """One thing that was not seen so on simulated vendors."""

    step: str
    what: str
    seen: str
    simulated: str


def read_expected(path: Path = EXPECTED) -> dict[str, Any]:
    """By step: `results`, each with all that it came to, and `figures`, each from least to most."""
    expected: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return expected


def differences(verdicts: Sequence[Verdict], expected: dict[str, Any]) -> list[Difference]:
    found = []
    for verdict in verdicts:
        known = expected.get(verdict.step, {"results": {}, "figures": {}})
        for what, seen in verdict.results.items():
            usual = known["results"].get(what)
            if usual is None or seen not in usual:
                simulated = " or ".join(usual) if usual else "never seen"
                found.append(Difference(verdict.step, what, seen, simulated))
        for what, value in verdict.figures.items():
            least, most = known["figures"].get(what, (None, None))
            if least is None:
                found.append(Difference(verdict.step, what, f"{value:.4g}", "never seen"))
            elif not least / _FACTOR <= value <= most * _FACTOR + _ROUNDING:
                usual = f"{least:.4g} to {most:.4g}"
                found.append(Difference(verdict.step, what, f"{value:.4g}", usual))
    return found


def add_expected(path: Path, verdicts: Sequence[Verdict]) -> None:
    """Add what the steps that passed came to. Raises OSError."""
    expected = read_expected(path)
    for verdict in verdicts:
        if not verdict.passed:
            continue
        known = expected.setdefault(verdict.step, {"results": {}, "figures": {}})
        for what, seen in verdict.results.items():
            usual = known["results"].setdefault(what, [])
            if seen not in usual:
                usual.append(seen)
        for what, value in verdict.figures.items():
            least, most = known["figures"].get(what, (value, value))
            known["figures"][what] = [min(least, value), max(most, value)]
    write_whole(path, json.dumps(expected, indent=1, sort_keys=True) + "\n")
