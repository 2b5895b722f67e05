"""The errors of a rank's operators in one check, as numbers that ranks exchange for the log."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetero.observe.operators.difference import Difference, Excess

KINDS = ("attention", "linear", "norm", "activation", "rotary", "residual", "embedding", "loss")
_NUMBERS = 3
"""Of each kind: the largest error, what is allowed, and an Excess."""
_WORDS = {
    Excess.NONE: "",
    Excess.ELEMENTS: " WRONG in single elements",
    Excess.FACTOR: " WRONG by a common factor",
    Excess.ERROR: " WRONG",
}


class OperatorErrors:
    """Of each kind of operator, the largest error of one rank."""

    def __init__(self) -> None:
        self.numbers = [0.0] * (_NUMBERS * len(KINDS))

    def add(self, kind: str, found: Difference) -> None:
        at = _NUMBERS * KINDS.index(kind)
        error = math.inf if math.isnan(found.error) else found.error
        before, allowed, excess = self.numbers[at : at + _NUMBERS]
        if not allowed or error / found.limits.error > before / allowed:
            self.numbers[at : at + 2] = [error, found.limits.error]
        self.numbers[at + 2] = max(excess, float(found.excess))


def summary(rows: Sequence[Sequence[float]]) -> str:
    """The largest error of each kind over ranks and its tolerance; empty without any comparison.

    What exceeds its tolerance otherwise than by this error says so: there the error may be small.
    """
    parts = []
    for kind, name in enumerate(KINDS):
        own = [row[_NUMBERS * kind : _NUMBERS * (kind + 1)] for row in rows]
        compared = [each for each in own if each[1]]
        if compared:
            error, allowed, _ = max(compared, key=lambda each: each[0] / each[1])
            excess = Excess(int(max(each[2] for each in compared)))
            parts.append(f"{name} {error:.1e} of {allowed:.1e}{_WORDS[excess]}")
    return ", ".join(parts)
