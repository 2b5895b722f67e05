"""The table as a picture: a bar for every row, the published figure beside it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib.figure import Figure

from bench.reproduction.measurement import RowResult
from hetero.tools.reports.charts import LIGHT, as_png, style_axes

OURS, THEIRS = "#b3402a", "#a9c3e6"
WIDTH = 0.38
TITLE_COLUMNS = 88


def draw(results: Sequence[RowResult], *, title: str, published_label: str) -> bytes:
    """A PNG. Whiskers reach from the slowest to the fastest iteration."""
    figure = Figure(figsize=(8.6, 4.4), layout="constrained", facecolor=LIGHT.paper)
    axes = figure.add_subplot()
    style_axes(axes, LIGHT, x_label="")
    axes.set_axisbelow(True)
    measured = [(i, r.tflops) for i, r in enumerate(results) if r.tflops is not None]
    published = [(i, r.published) for i, r in enumerate(results) if r.published is not None]
    medians = [spread.median for _, spread in measured]
    if measured:
        bars = axes.bar(
            [i - WIDTH / 2 for i, _ in measured],
            medians,
            WIDTH,
            color=OURS,
            label="here, causal attention counted once",
            yerr=(
                [spread.median - spread.smallest for _, spread in measured],
                [spread.largest - spread.median for _, spread in measured],
            ),
            error_kw={"ecolor": LIGHT.ink, "capsize": 3, "linewidth": 1},
        )
        # Inside: above the bar is the mark of the full square.
        axes.bar_label(bars, fmt="%.4g", fontsize=9, color=LIGHT.paper, label_type="center")
    squares = [
        (i, r.tflops_full_square.median) for i, r in enumerate(results) if r.tflops_full_square
    ]
    if squares:
        positions = [i - WIDTH / 2 for i, _ in squares]
        axes.hlines(
            [value for _, value in squares],
            [x - WIDTH / 2 for x in positions],
            [x + WIDTH / 2 for x in positions],
            colors=OURS,
            linestyles="dotted",
            label="the same, attention as a full square",
        )
    if published:
        bars = axes.bar(
            [i + WIDTH / 2 for i, _ in published],
            [figure_.tflops for _, figure_ in published],
            WIDTH,
            color=THEIRS,
            label=published_label,
        )
        axes.bar_label(bars, fmt="%.4g", fontsize=9, color=LIGHT.ink, padding=2)
    axes.set_xticks(range(len(results)), [_tick(result) for result in results])
    axes.set_ylabel("TFLOP/s per GPU")
    axes.set_title(textwrap.fill(title, TITLE_COLUMNS), fontsize=10, color=LIGHT.ink, loc="left")
    axes.margins(y=0.25)
    if measured or published:
        axes.legend(frameon=False, labelcolor=LIGHT.ink, fontsize=9, loc="upper right", ncols=2)
    return as_png(figure)


def _tick(result: RowResult) -> str:
    """The row, and below it what carried the tensors or that nothing was measured."""
    return f"{result.row}\n{result.boundary if result.tflops else 'not measured'}"
