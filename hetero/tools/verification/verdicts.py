"""What a step of `hetero verify` came to. Pure data, stored as each step ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


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
