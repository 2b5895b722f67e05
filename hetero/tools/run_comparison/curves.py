"""The curves of one run, read from the file that `--metrics-file` wrote, as such and smoothed.

A smoothed point is the mean of the last few iterations, of whole windows only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from hetero.errors import UserError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_LARGEST_ITERATION = 2**53


@dataclass(frozen=True, eq=False)
class Curve:
    """What one run wrote of its iterations, in ascending order; float64 as in the file.

    A number that the file lacks or calls null is NaN.
    """

    name: str
    """The file, as it was given."""
    iteration: Integers
    loss: Floats
    grad_norm: Floats
    """Before clipping."""
    learning_rate: Floats
    weight_decay: Floats
    batch_size: Floats
    """Samples of the global batch."""
    consumed_tokens: Floats
    skipped: NDArray[np.bool_]
    simulated: bool
    """Some rank played a vendor that it was not."""
    weights: str = ""
    """SHA-256 of the weights at the end, from `--hetero-report`; empty where it is not known."""
    notes: tuple[str, ...] = ()
    """What was peculiar about the file."""

    def __len__(self) -> int:
        return len(self.iteration)

    def at(self, positions: Integers) -> Curve:
        """The curve of some of its iterations alone."""
        columns: dict[str, Any] = {
            field.name: getattr(self, field.name)[positions]
            for field in fields(self)
            if isinstance(getattr(self, field.name), np.ndarray)
        }
        return replace(self, **columns)


def read_curve(path: str) -> Curve:
    """Read a metrics file.

    Where the iteration goes back, a run was resumed from a checkpoint: the iterations that it
    computed again replace what was written of them before, and of later ones. A last line that was
    cut off, as a killed run leaves it, is left out. Both are said in the notes. Raises UserError
    for anything else that is no metrics file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); name a file that --metrics-file wrote"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text; name a file that --metrics-file wrote") from error
    notes: list[str] = []
    rows = _without_rewritten(_rows(path, text, notes), path, notes)
    if not rows:
        raise UserError(f"{path} holds no iteration; name the metrics file of a run that trained")
    return replace(curve_of(rows, name=path), notes=tuple(notes))


def curve_of(rows: Sequence[Mapping[str, Any]], *, name: str, weights: str = "") -> Curve:
    """The curves of a run whose records `rows` are, one an iteration."""
    return Curve(
        name=name,
        iteration=np.array([row["iteration"] for row in rows], dtype=np.int64),
        loss=_column(rows, "loss"),
        grad_norm=_column(rows, "grad_norm"),
        learning_rate=_column(rows, "learning_rate"),
        weight_decay=_column(rows, "weight_decay"),
        batch_size=_column(rows, "batch_size"),
        consumed_tokens=_column(rows, "consumed_tokens"),
        skipped=np.array([row.get("skipped") is True for row in rows], dtype=np.bool_),
        simulated=any(row.get("simulated") is True for row in rows),
        weights=weights,
    )


def span(curve: Curve) -> str:
    """In words, which iterations it has."""
    if not len(curve):
        return "no iteration"
    return f"iterations {curve.iteration[0]} to {curve.iteration[-1]}"


def _rows(path: str, text: str, notes: list[str]) -> list[dict[str, Any]]:
    lines = text.split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            # Every whole line ends with a newline, so only the last element can be a piece.
            if number == len(lines):
                notes.append(f"{path}: line {number} is cut off and left out")
                continue
            raise UserError(
                f"{path}, line {number}, is not JSON; name a file that --metrics-file wrote"
            ) from error
        _check_row(row, f"{path}, line {number},")
        rows.append(row)
    return rows


_NUMBERS = ("loss", "grad_norm", "learning_rate", "weight_decay", "batch_size", "consumed_tokens")


def _check_row(row: Any, where: str) -> None:
    if not isinstance(row, dict) or "iteration" not in row or "loss" not in row:
        raise UserError(
            f"{where} is no object with an iteration and a loss; name a file that --metrics-file "
            "wrote"
        )
    iteration = row["iteration"]
    if type(iteration) is not int or not 0 <= iteration < _LARGEST_ITERATION:
        raise UserError(f"{where} has the iteration {iteration!r}, which is no whole number")
    for name in _NUMBERS:
        value = row.get(name)
        if value is not None and type(value) not in (int, float):
            raise UserError(f"{where} has the {name} {value!r}, which is no number")


def _without_rewritten(
    rows: list[dict[str, Any]], path: str, notes: list[str]
) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    for row in rows:
        if kept and row["iteration"] <= kept[-1]["iteration"]:
            last = kept[-1]["iteration"]
            while kept and kept[-1]["iteration"] >= row["iteration"]:
                kept.pop()
            notes.append(
                f"{path}: the run went back from iteration {last} to {row['iteration']}, as one "
                "that is resumed does; what it wrote again counts"
            )
        kept.append(row)
    return kept


def _column(rows: Iterable[Mapping[str, Any]], name: str) -> Floats:
    return np.array([_number(row.get(name)) for row in rows], dtype=np.float64)


def _number(value: int | float | None) -> float:
    if value is None:
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


_LARGEST_WINDOW = 200


def default_window(iterations: int) -> int:
    """A tenth of what is compared, at most 200 iterations."""
    return max(1, min(_LARGEST_WINDOW, iterations // 10))


def running_mean(values: Floats, window: int) -> Floats:
    """Mean of each `window` consecutive values; shorter than `values` by `window` - 1.

    What is not finite spoils the windows that it lies in, and no others.
    """
    return np.asarray(sliding_window_view(values, window).mean(axis=-1), dtype=np.float64)


def smoothed_iterations(curve: Curve, window: int) -> Integers:
    """The last iteration of each window."""
    return curve.iteration[window - 1 :]


def smoothed_loss(curve: Curve, window: int) -> Floats:
    return running_mean(curve.loss, window)


def smoothed_grad_norm(curve: Curve, window: int) -> Floats:
    """The geometric mean, which one spike does not carry away."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithm = np.log(forward_filled_grad_norm(curve))
        return np.exp(running_mean(logarithm, window))


def forward_filled_grad_norm(curve: Curve) -> Floats:
    """The gradient norm, with the last one before it where a skipped update left none."""
    missing = curve.skipped & ~np.isfinite(curve.grad_norm)
    if not missing.any() or missing.all():
        return curve.grad_norm
    positions = np.where(missing, -1, np.arange(len(curve)))
    held = np.maximum.accumulate(positions)
    return curve.grad_norm[np.where(held < 0, np.flatnonzero(~missing)[0], held)]


def has_grad_norm(curve: Curve) -> bool:
    return bool(np.isfinite(curve.grad_norm).any())
