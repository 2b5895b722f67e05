"""A shrunk command as it is and with three flags more: trained, and what differs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.public_training.shrinking import FP8, Shrunk
from hetero.tools.run_comparison.alignment import BitwiseComparison, compare_bitwise
from hetero.tools.run_comparison.curves import Curve
from hetero.tools.runs import SIMULATED, Launch, homogeneous_flags, run_to_end
from megatron.hetero.arguments import parse_args

SIZES = (1, 1)
THREE_FLAGS = (
    "--hetero-pipeline",
    *("--hetero-vendors", "nvidia", "amd"),
    *("--hetero-pipeline-sizes", *map(str, SIZES)),
)
ONE_TYPE_FLAGS = (
    "--hetero-pipeline",
    *("--hetero-vendors", "cpu", "nvidia"),
    *("--hetero-pipeline-sizes", *map(str, SIZES)),
)
"""Mixed, of vendors whose types of fp8 are the same, as those of NVIDIA and MI350 are."""
SECONDS = 300.0
"""No run may take longer."""
_ON_CPU = {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Runs:
    """What was trained of one command."""

    homogeneous: Curve
    mixed: Curve
    staged: Curve
    """Homogeneous with as many pipeline stages as the mixed run; the script's own where it has."""
    processes: tuple[int, int]
    """Of the homogeneous run, and of the others."""
    one_type: Curve | None = None
    """With fp8, mixed of vendors that have the same types of it."""

    @property
    def from_own(self) -> BitwiseComparison:
        """What the three flags change, the layout included."""
        return compare_bitwise(self.mixed, self.homogeneous)

    @property
    def from_staged(self) -> BitwiseComparison:
        """What they change of a layout."""
        return compare_bitwise(self.mixed, self.staged)

    @property
    def from_one_type(self) -> BitwiseComparison | None:
        """What a mixed run of one type changes of a layout; None without fp8."""
        return None if self.one_type is None else compare_bitwise(self.one_type, self.staged)

    def as_mapping(self) -> dict[str, Any]:
        own, spread = self.processes
        runs = {
            "homogeneous": (self.homogeneous, own),
            "mixed": (self.mixed, spread),
            "staged": (self.staged, spread),
        }
        if self.one_type is not None:
            runs["one type"] = (self.one_type, spread)
        return {
            kind: {
                "processes": count,
                "losses": curve.loss.tolist(),
                "grad_norms": [None if math.isnan(norm) else norm for norm in curve.grad_norm],
                "skipped": int(curve.skipped.sum()),
                "weights": curve.weights,
                "simulated": curve.simulated,
            }
            for kind, (curve, count) in runs.items()
        }


def train_all(shrunk: Shrunk, *, name: str, text: Path, work: Path, out: Path) -> Runs:
    """Train the command as it is and mixed. Raises UserError, StepFailure or DeadlinePassed.

    What the command itself writes goes below `work`, what is known of the runs into `out`.
    """
    stages = sum(SIZES)

    def trained(kind: str, *more: str, processes: int, simulated: bool = False) -> Curve:
        run = f"{name}-{kind}"
        flags = (*shrunk.flags(text=text, run=work / run), *more)
        # A launcher would answer bad flags with an exit code and pages of its own.
        parse_args(flags, world_size=processes)
        environ = _ON_CPU | (SIMULATED if simulated else {})
        launch = Launch(run, flags, processes, out, environ, SECONDS)
        return run_to_end(launch).curve(run)

    spread = shrunk.processes_of(stages)
    homogeneous = trained("homogeneous", processes=shrunk.processes)
    mixed = trained("mixed", *THREE_FLAGS, processes=spread, simulated=True)
    staged = homogeneous
    if shrunk.pipeline != stages:
        staged = trained("staged", *homogeneous_flags(stages=stages, layers=None), processes=spread)
    one_type = None
    if FP8 in shrunk.words:
        one_type = trained("one-type", *ONE_TYPE_FLAGS, processes=spread, simulated=True)
    return Runs(homogeneous, mixed, staged, (shrunk.processes, spread), one_type)
