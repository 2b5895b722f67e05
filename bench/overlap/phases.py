"""What a run over a slowed link does in which iterations, told to its ranks by a variable."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

VARIABLE = "HETERO_OVERLAP_PHASES"
"""Where a rank finds them, as JSON."""
MEASURED = "HETERO_OVERLAP_MEASURED"
"""The file, but for the rank at its end, in which a rank leaves what its wire carried."""


@dataclass(frozen=True)
class Phase:
    """Iterations over a wire of one speed."""

    bytes_per_s: float | None
    """Of each direction; None for the link as it is."""
    receives_early: bool
    """Whether the next receive is posted before it is asked for."""
    iterations: int


def as_variable(phases: Sequence[Phase]) -> dict[str, str]:
    return {VARIABLE: json.dumps([asdict(phase) for phase in phases])}


def from_variable() -> list[Phase]:
    return [Phase(**fields) for fields in json.loads(os.environ[VARIABLE])]


def phase_of(phases: Sequence[Phase], iteration: int) -> int:
    """The number of the phase of an iteration, counted from 0; the last one goes on."""
    for number, phase in enumerate(phases):
        iteration -= phase.iterations
        if iteration < 0:
            return number
    return len(phases) - 1
