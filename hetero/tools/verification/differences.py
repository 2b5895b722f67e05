"""What simulated vendors came to, and what of a run differs from that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.tools.reports.page import write_whole
from hetero.tools.verification.verdicts import Verdict

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
