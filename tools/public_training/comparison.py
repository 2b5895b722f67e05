"""A shrunk command as it is and with three flags more: trained, and what differs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.training.arguments import parse_args
from tools.public_training.shrinking import Shrunk
from tools.runs import SIMULATED, Finished, Launch, homogeneous_flags, run_to_end

SIZES = (1, 1)
THREE_FLAGS = (
    "--hetero-pipeline",
    *("--hetero-vendors", "nvidia", "amd"),
    *("--hetero-pipeline-sizes", *map(str, SIZES)),
)
SECONDS = 300.0
"""No run may take longer."""
_ON_CPU = {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Trained:
    """What one run left: losses and gradient norms by iteration, and a digest of its weights."""

    processes: int
    losses: tuple[float, ...]
    grad_norms: tuple[float | None, ...]
    skipped: int
    weights: str
    simulated: bool


@dataclass(frozen=True)
class Difference:
    """How far the mixed run is from another: 0 where all iterations are equal, bit for bit."""

    losses: float
    """The largest of an iteration, relative to the other run's, as are gradient norms."""
    grad_norms: float
    weights_equal: bool

    @property
    def is_none(self) -> bool:
        return not self.losses and not self.grad_norms and self.weights_equal


@dataclass(frozen=True)
class Runs:
    """What was trained of one command."""

    homogeneous: Trained
    mixed: Trained
    staged: Trained
    """Homogeneous with as many pipeline stages as the mixed run; the script's own where it has."""

    @property
    def from_own(self) -> Difference:
        """What the three flags change, the layout included."""
        return _difference(self.homogeneous, self.mixed)

    @property
    def from_staged(self) -> Difference:
        """What they change of a layout."""
        return _difference(self.staged, self.mixed)


def _difference(plain: Trained, mixed: Trained) -> Difference:
    return Difference(
        losses=_largest(plain.losses, mixed.losses),
        grad_norms=_largest(plain.grad_norms, mixed.grad_norms),
        weights_equal=plain.weights == mixed.weights,
    )


def _largest(plain: Sequence[float | None], mixed: Sequence[float | None]) -> float:
    return max((_relative(*both) for both in zip(plain, mixed, strict=True)), default=0.0)


def _relative(plain: float | None, mixed: float | None) -> float:
    """Infinite where only one of two runs skipped the iteration."""
    if plain == mixed:
        return 0.0
    return abs(mixed - plain) / abs(plain) if plain and mixed else math.inf


def train_all(shrunk: Shrunk, *, name: str, text: Path, work: Path, out: Path) -> Runs:
    """Train the command as it is and mixed. Raises UserError, StepFailure or DeadlinePassed.

    What the command itself writes goes below `work`, what is known of the runs into `out`.
    """
    stages = sum(SIZES)

    def trained(kind: str, *more: str, processes: int, simulated: bool = False) -> Trained:
        run = f"{name}-{kind}"
        flags = (*shrunk.flags(text=text, run=work / run), *more)
        # A launcher would answer bad flags with an exit code and pages of its own.
        parse_args(flags, world_size=processes)
        environ = _ON_CPU | (SIMULATED if simulated else {})
        launch = Launch(run, flags, processes, out, environ, SECONDS)
        return _read(run_to_end(launch), processes)

    spread = shrunk.processes_of(stages)
    homogeneous = trained("homogeneous", processes=shrunk.processes)
    mixed = trained("mixed", *THREE_FLAGS, processes=spread, simulated=True)
    staged = homogeneous
    if shrunk.pipeline != stages:
        staged = trained("staged", *homogeneous_flags(stages=stages, layers=None), processes=spread)
    return Runs(homogeneous, mixed, staged)


def _read(finished: Finished, processes: int) -> Trained:
    return Trained(
        processes=processes,
        losses=tuple(row["loss"] for row in finished.iterations),
        grad_norms=tuple(row["grad_norm"] for row in finished.iterations),
        skipped=sum(row["skipped"] for row in finished.iterations),
        weights=finished.report["weights"]["sha256"],
        simulated=finished.report["simulated"],
    )
