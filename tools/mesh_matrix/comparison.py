"""What a run over several meshes computed, beside one process: losses, norms and all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.training.checkpoint.reader import CheckpointReader
from tools.runs import Finished

LIMITS = {"loss": 1e-5, "norm": 1e-6, "gradients": 1e-5}
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

    @property
    def is_equal(self) -> bool:
        numbers = asdict(self)
        within = all(numbers[name] <= limit for name, limit in LIMITS.items())
        return within and self.parameters > 0 and self.bytes_ratio == 1.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"is_equal": self.is_equal}


def compare(
    run: Finished, reference: Finished, *, saved: Path, saved_reference: Path, expected_bytes: int
) -> Differences:
    gradients = gradient_differences(saved, saved_reference)
    return Differences(
        loss=_largest(run, reference, "loss"),
        norm=_largest(run, reference, "grad_norm"),
        gradients=max(gradients, default=0.0),
        parameters=len(gradients),
        bytes_ratio=run.report["boundary_bytes"] / expected_bytes,
    )


def _largest(run: Finished, reference: Finished, figure: str) -> float:
    ours, theirs = ([row[figure] for row in r.iterations] for r in (run, reference))
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


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
