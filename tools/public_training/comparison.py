"""A shrunk command as it is and with three flags more: both trained, and what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.training.arguments import parse_args
from tools.public_training.shrinking import Shrunk
from tools.runs import SIMULATED, Finished, Launch, run_to_end

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
class Pair:
    """The two runs of a command."""

    homogeneous: Trained
    mixed: Trained

    @property
    def losses_equal(self) -> bool:
        return self.homogeneous.losses == self.mixed.losses

    @property
    def weights_equal(self) -> bool:
        return self.homogeneous.weights == self.mixed.weights

    @property
    def largest_difference(self) -> float:
        """Of two losses of the same iteration, relative to the homogeneous one."""
        both = zip(self.homogeneous.losses, self.mixed.losses, strict=True)
        return max(abs(mixed - plain) / abs(plain) for plain, mixed in both)


def train_both(shrunk: Shrunk, *, name: str, text: Path, work: Path, out: Path) -> Pair:
    """Train the command as it is and mixed. Raises UserError, StepFailure or DeadlinePassed.

    What the command itself writes goes below `work`, what is known of the runs into `out`.
    """
    where = {"text": text, "work": work, "out": out}
    return Pair(
        homogeneous=_train(shrunk, (), f"{name}-homogeneous", **where),
        mixed=_train(shrunk, THREE_FLAGS, f"{name}-mixed", **where),
    )


def _train(
    shrunk: Shrunk, more: Sequence[str], name: str, *, text: Path, work: Path, out: Path
) -> Trained:
    processes = shrunk.processes_of(sum(SIZES)) if more else shrunk.processes
    flags = (*shrunk.flags(text=text, run=work / name), *more)
    # A launcher would answer bad flags with an exit code and pages of its own.
    parse_args(flags, world_size=processes)
    launch = Launch(
        name=name,
        flags=flags,
        nproc=processes,
        folder=out,
        environ=_ON_CPU | (SIMULATED if more else {}),
        deadline=SECONDS,
    )
    return _read(run_to_end(launch), processes)


def _read(finished: Finished, processes: int) -> Trained:
    return Trained(
        processes=processes,
        losses=tuple(row["loss"] for row in finished.iterations),
        grad_norms=tuple(row["grad_norm"] for row in finished.iterations),
        skipped=sum(row["skipped"] for row in finished.iterations),
        weights=finished.report["weights"]["sha256"],
        simulated=finished.report["simulated"],
    )
