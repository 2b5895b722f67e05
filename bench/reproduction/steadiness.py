"""How steady a long run is: the tokens/s and the loss of every iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles

from matplotlib.figure import Figure

from bench.reproduction.measurement import Attempt, Measurement
from hetero.tools.reports.charts import LIGHT, as_png, style_axes
from hetero.tools.reports.text_table import markdown

PART = 100
"""Iterations at either end that are compared; a run has to have both beside its warm-up."""


@dataclass(frozen=True)
class Steadiness:
    """Of one run: tokens/s without the warm-up, and losses."""

    row: str
    round: int
    iterations: int
    p5: float
    p50: float
    p95: float
    slowest: float
    first: float
    """Median of the first hundred."""
    last: float
    first_loss: float
    last_loss: float
    """Mean of the last hundred."""

    @property
    def drift(self) -> float:
        """The last hundred over the first."""
        return self.last / self.first


def steadiness(attempts: Sequence[Attempt]) -> list[Steadiness]:
    """Of every run that is long enough."""
    return [
        _of(one, one.measurement)
        for one in attempts
        if one.measurement and len(one.measurement.tokens_per_s) >= 2 * PART
    ]


def _of(attempt: Attempt, measured: Measurement) -> Steadiness:
    tokens = measured.tokens_per_s
    parts = quantiles(tokens, n=20, method="inclusive")
    return Steadiness(
        row=attempt.row,
        round=attempt.round,
        iterations=len(tokens),
        p5=parts[0],
        p50=median(tokens),
        p95=parts[-1],
        slowest=min(tokens),
        first=median(tokens[:PART]),
        last=median(tokens[-PART:]),
        first_loss=measured.losses[0],
        last_loss=mean(measured.losses[-PART:]),
    )


HEADINGS = (
    *("row", "iterations", "tokens/s: median", "p5 to p95", "slowest", f"first {PART}"),
    *(f"last {PART}", "last / first", f"loss: first, mean of last {PART}"),
)


def render(runs: Sequence[Steadiness]) -> str:
    """The Markdown table, one line a run."""
    rows = [
        (
            *(_name(run), str(run.iterations), f"{run.p50:,.0f}"),
            *(f"{run.p5:,.0f} to {run.p95:,.0f}", f"{run.slowest:,.0f}", f"{run.first:,.0f}"),
            *(f"{run.last:,.0f}", f"{run.drift:.4f}"),
            f"{run.first_loss:.3f}, {run.last_loss:.3f}",
        )
        for run in runs
    ]
    return markdown(HEADINGS, rows)


def _name(run: Steadiness | Attempt) -> str:
    return run.row + f", round {run.round}" * (run.round > 1)


def draw(attempts: Sequence[Attempt], *, title: str) -> bytes:
    """A PNG: tokens/s of every iteration above, losses below, a line for each run."""
    figure = Figure(figsize=(8.6, 5.6), layout="constrained", facecolor=LIGHT.paper)
    speeds, losses = figure.subplots(2, sharex=True)
    for axes, label in ((speeds, "tokens/s"), (losses, "loss")):
        style_axes(axes, LIGHT, x_label="iteration" if axes is losses else "")
        axes.set_ylabel(label)
    for one in attempts:
        if one.measurement is None:
            continue
        name = _name(one)
        losses_of, tokens = one.measurement.losses, one.measurement.tokens_per_s
        first = len(losses_of) - len(tokens) + 1
        speeds.plot(range(first, len(losses_of) + 1), tokens, linewidth=0.8, label=name)
        losses.plot(range(1, len(losses_of) + 1), losses_of, linewidth=0.8, label=name)
    speeds.set_ylim(bottom=0)
    speeds.set_title(title, fontsize=10, color=LIGHT.ink, loc="left", wrap=True)
    if speeds.lines:
        speeds.legend(frameon=False, labelcolor=LIGHT.ink, fontsize=9, loc="lower right")
    return as_png(figure)
