"""What a run over several meshes computed, beside one process: losses, norms and all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetero.tools.runs import Finished
from megatron.hetero.checkpoint.reader import CheckpointReader

LIMITS = {"loss": 1e-5, "norm": 1e-6, "gradients": 1e-5}
AMPLIFIED_NORM = 1e-5
"""What Adam may make of rounding over all steps."""
MEAN_OF_GRADIENTS = "optimizer.exp_avg."
"""In a checkpoint of Adam's first step: of every parameter, a tenth of its clipped gradient."""


@dataclass(frozen=True)
class Differences:
    """The largest relative ones."""

    loss: float
    norm: float
    gradients: float
    """Of any parameter's gradient in the first step: norm of the difference over its norm."""
    parameters: int
    """How many were compared."""
    bytes_ratio: float
    """Bytes over boundaries, over those that the tensors have."""
    worst_norm_step: int = 0
    norm_resumed: float | None = None
    """Of that step alone, from one process's weights: without what Adam made of the rounding of
    earlier steps. Asked for where `norm` is over its limit, and then judged in its place."""

    @property
    def is_equal(self) -> bool:
        numbers = asdict(self)
        if self.norm_resumed is not None and self.norm <= AMPLIFIED_NORM:
            numbers["norm"] = self.norm_resumed
        within = all(numbers[name] <= limit for name, limit in LIMITS.items())
        return within and self.parameters > 0 and self.bytes_ratio == 1.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"is_equal": self.is_equal}


def compare(
    run: Finished, reference: Finished, *, saved: Path, saved_reference: Path, expected_bytes: int
) -> Differences:
    gradients = gradient_differences(saved, saved_reference)
    norms = _differences(run, reference, "grad_norm")
    worst = max(norms, key=lambda step: norms[step])
    return Differences(
        loss=max(_differences(run, reference, "loss").values()),
        norm=norms[worst],
        gradients=max(gradients, default=0.0),
        parameters=len(gradients),
        bytes_ratio=run.report["boundary_bytes"] / expected_bytes,
        worst_norm_step=worst,
    )


def norm_difference(run: Finished, reference: Finished, *, step: int) -> float:
    """Relative, of one step; `run` may have begun later than `reference`."""
    norms = (
        next(row["grad_norm"] for row in found.iterations if row["iteration"] == step)
        for found in (run, reference)
    )
    ours, theirs = norms
    return float(abs(ours - theirs) / abs(theirs))


def _differences(run: Finished, reference: Finished, figure: str) -> dict[int, float]:
    """Relative ones, by step."""
    return {
        ours["iteration"]: abs(ours[figure] - theirs[figure]) / abs(theirs[figure])
        for ours, theirs in zip(run.iterations, reference.iterations, strict=True)
    }


def gradient_differences(saved: Path, reference: Path) -> list[float]:
    """Of every parameter, from two checkpoints of a first step. They name the same parameters."""
    found = []
    with CheckpointReader.open(saved) as ours, CheckpointReader.open(reference) as theirs:
        names = _gradient_names(ours)
        if names != _gradient_names(theirs):
            raise ValueError(f"{saved} and {reference} hold gradients of different parameters")
        for name in names:
            expected = theirs.tensor(name).double()
            difference = (ours.tensor(name).double() - expected).norm() / expected.norm()
            found.append(float(difference))
    return found


def _gradient_names(reader: CheckpointReader) -> Sequence[str]:
    return sorted(n for n in reader.names(optimizer=True) if n.startswith(MEAN_OF_GRADIENTS))
