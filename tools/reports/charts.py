"""Charts as SVG that takes its colours from the page around it, so that it follows its theme."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Stand-ins that no chart uses otherwise, replaced by the page's own colours once drawn.
_COLOURS = {
    "#010203": "var(--ink-soft)",
    "#010204": "var(--rule)",
    "#010205": "var(--mixed)",
    "#010206": "var(--baseline)",
}
_INK, _RULE, _MIXED, _BASELINE = _COLOURS


@dataclass(frozen=True)
class Theme:
    """The colours around a chart's own lines."""

    ink: str
    rule: str
    paper: str


PAGE = Theme(ink=_INK, rule=_RULE, paper="none")
"""The reader's, once `as_svg` has put the page's in their place."""
LIGHT = Theme(ink="#5d636e", rule="#e2e0da", paper="#fbfaf7")
"""Those of the page by day, for a picture that stands alone."""


def loss_chart(
    mixed: Sequence[float],
    baseline: Sequence[float],
    differences: Sequence[float],
    names: tuple[str, str],
) -> str:
    """Both losses, and below them, over the same iterations, the mixed one minus the baseline."""
    figure = Figure(figsize=(8.6, 5.0), layout="constrained")
    losses, below = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1.3))
    style_axes(losses, PAGE, x_label="")
    style_axes(below, PAGE, x_label="iteration")
    # The baseline broad and pale, so that an equal one on top of it is still seen.
    broad = {"linewidth": 6, "solid_capstyle": "round", "solid_joinstyle": "round"}
    iterations = range(1, len(mixed) + 1)
    losses.plot(iterations, baseline, color=_BASELINE, label=names[1], **broad)
    losses.plot(iterations, mixed, color=_MIXED, linewidth=1.6, label=names[0])
    losses.set_ylabel("loss")
    losses.legend(frameon=False, labelcolor=_INK, loc="upper right")
    _draw_differences(below, iterations, differences)
    figure.align_ylabels()
    description = f"Loss of {names[0]} and of {names[1]} by iteration, and their difference"
    return as_svg(figure, "loss", description)


def _draw_differences(axes: Axes, iterations: Sequence[int], differences: Sequence[float]) -> None:
    axes.axhline(0, color=_RULE, linewidth=1)
    axes.plot(iterations, differences, color=_MIXED, linewidth=1.6)
    largest = max((abs(d) for d in differences), default=0.0)
    if largest == 0:
        # Any scale would do; this one says that there is nothing to see.
        axes.set_ylim(-1, 1)
        axes.set_yticks([0])
    else:
        axes.set_ylim(-1.15 * largest, 1.15 * largest)
    axes.set_ylabel("difference")


def style_axes(axes: Axes, theme: Theme, *, x_label: str) -> None:
    """The look that all our charts share."""
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.rule)
    axes.grid(axis="y", color=theme.rule, linewidth=0.8)
    axes.tick_params(colors=theme.ink, length=0, labelsize=10)
    axes.set_xlabel(x_label, color=theme.ink)
    axes.yaxis.label.set_color(theme.ink)
    axes.margins(x=0.01)


def as_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an element of a page, in the page's colours and font."""
    FigureCanvasSVG(figure)
    figure.patch.set_visible(False)
    stream = io.StringIO()
    # Text stays text, in the page's own font; ids differ between charts that share a page.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "inherit"}):
        figure.savefig(
            stream,
            format="svg",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    drawing = stream.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    for stand_in, colour in _COLOURS.items():
        drawing = drawing.replace(stand_in, colour)
    drawing = re.sub(r'\bid="([\w.]+)"', rf'id="{name}-\1"', drawing)
    drawing = re.sub(r'(href="|url\()#([\w.]+)', rf"\1#{name}-\2", drawing)
    label = f'<svg role="img" aria-label="{html.escape(description)}" '
    return drawing.replace("<svg ", label, 1)
