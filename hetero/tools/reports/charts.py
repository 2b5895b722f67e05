"""Charts of one look: SVG in the colours of the page around it, or pictures that stand alone."""

from __future__ import annotations

import html
import io
import re
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Stand-ins that no chart uses otherwise, replaced by the page's own colours once drawn.
_COLOURS = {
    "#010203": "var(--ink-soft)",
    "#010204": "var(--rule)",
}
_INK, _RULE = _COLOURS


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


def as_png(figure: Figure) -> bytes:
    """The figure as a picture that stands alone, for a page of the documentation."""
    FigureCanvasAgg(figure)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=150, metadata={"Software": None})
    return stream.getvalue()


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
