"""The pictures of a comparison and its page: losses, differences, gradient norms.

The envelope is shaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hetero.text import counted
from hetero.tools.reports import page
from hetero.tools.reports.charts import LIGHT, PAGE, Theme, as_svg, style_axes
from hetero.tools.run_comparison.alignment import relative_difference
from hetero.tools.run_comparison.comparison import Comparison
from hetero.tools.run_comparison.curves import (
    Curve,
    Floats,
    Integers,
    has_grad_norm,
    smoothed_grad_norm,
    smoothed_iterations,
    smoothed_loss,
)
from hetero.tools.run_comparison.report import finding_row, summary, warnings

# Readable on a light and on a dark page alike.
_CANDIDATES = ("#d1492e", "#2a9d78", "#9560c2", "#cf8f1d", "#c2528b", "#6f9e1f")
_REFERENCE = "#3b82c4"
_SEED = "#8b8f99"
_MOST_POINTS = 2000

Draw = Callable[[Axes, Comparison], None]


def draw_png(comparison: Comparison, path: Path) -> None:
    """All panels on paper of their own."""
    panels = _panels(comparison)
    figure = Figure(figsize=(9.5, 3.2 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.patch.set_facecolor(LIGHT.paper)
    for row, (draw, _) in enumerate(panels.values()):
        _panel(figure.add_subplot(len(panels), 1, row + 1), comparison, draw, LIGHT, row == 0)
    if comparison.simulated:
        figure.suptitle("simulated", color=LIGHT.ink, fontsize=11)
    figure.savefig(path, format="png", dpi=110)


def panel_svgs(comparison: Comparison) -> list[tuple[str, str]]:
    """Caption and drawing of each panel, for a page."""
    drawings = []
    for number, (name, (draw, caption)) in enumerate(_panels(comparison).items()):
        figure = Figure(figsize=(8.6, 3.3), layout="constrained")
        _panel(figure.add_subplot(), comparison, draw, PAGE, number == 0)
        drawings.append((caption, as_svg(figure, name, caption)))
    return drawings


def _panels(comparison: Comparison) -> dict[str, tuple[Draw, str]]:
    band = " Shaded: where a further seed would lie." if comparison.envelopes else ""
    over = f"smoothed over {counted(comparison.window, 'iteration')}"
    panels: dict[str, tuple[Draw, str]] = {
        "loss": (_draw_loss, f"Loss, {over}.{band}"),
        "difference": (
            _draw_difference,
            f"Loss relative to the reference's, {over}, in per cent.{band}",
        ),
    }
    if has_grad_norm(comparison.aligned.reference):
        panels["grad-norm"] = (_draw_grad_norm, f"Gradient norm, {over}.{band}")
    return panels


def _panel(axes: Axes, comparison: Comparison, draw: Draw, theme: Theme, legend: bool) -> None:
    style_axes(axes, theme, x_label="iteration")
    draw(axes, comparison)
    axes.yaxis.label.set_color(theme.ink)
    if legend:
        names = axes.legend(frameon=False, labelcolor=theme.ink, loc="upper right", fontsize=9)
        for text in names.get_texts():
            # A dollar sign in a path is no formula.
            text.set_parse_math(False)


def _draw_loss(axes: Axes, comparison: Comparison) -> None:
    _draw_curves(axes, comparison, "loss", lambda run: smoothed_loss(run, comparison.window))
    axes.set_ylabel("loss")


def _draw_grad_norm(axes: Axes, comparison: Comparison) -> None:
    _draw_curves(
        axes, comparison, "grad_norm", lambda run: smoothed_grad_norm(run, comparison.window)
    )
    axes.set_ylabel("gradient norm")
    axes.set_yscale("log")


def _draw_difference(axes: Axes, comparison: Comparison) -> None:
    reference = smoothed_loss(comparison.aligned.reference, comparison.window)
    iteration = smoothed_iterations(comparison.aligned.reference, comparison.window)
    if envelope := comparison.envelopes.get("loss"):
        _shade(
            axes,
            iteration,
            100 * relative_difference(envelope.low, reference),
            100 * relative_difference(envelope.high, reference),
        )
    axes.axhline(0, color=_REFERENCE, linewidth=2)
    for run, colour, width in _others(comparison):
        smoothed = smoothed_loss(run, comparison.window)
        _plot(axes, iteration, 100 * relative_difference(smoothed, reference), colour, width)
    axes.set_ylabel("difference, %")


def _draw_curves(
    axes: Axes, comparison: Comparison, quantity: str, of: Callable[[Curve], Floats]
) -> None:
    reference = comparison.aligned.reference
    iteration = smoothed_iterations(reference, comparison.window)
    if envelope := comparison.envelopes.get(quantity):
        _shade(axes, iteration, envelope.low, envelope.high)
    _plot(axes, iteration, of(reference), _REFERENCE, 3.5, f"{reference.name} (reference)")
    for run, colour, width in _others(comparison):
        _plot(axes, iteration, of(run), colour, width, run.name)


def _others(comparison: Comparison) -> list[tuple[Curve, str, float]]:
    """Seeds and candidates, each with its colour and the width of its line."""
    aligned = comparison.aligned
    return [
        *((run, _SEED, 0.9) for run in aligned.seeds),
        *(
            (run, _CANDIDATES[number % len(_CANDIDATES)], 1.6)
            for number, run in enumerate(aligned.candidates)
        ),
    ]


def _plot(
    axes: Axes, iteration: Integers, values: Floats, colour: str, width: float, name: str = ""
) -> None:
    shown = _downsampled(len(iteration))
    marker = "o" if len(shown) == 1 else None
    axes.plot(
        iteration[shown],
        np.where(np.isfinite(values), values, np.nan)[shown],
        color=colour,
        linewidth=width,
        marker=marker,
        # The legend leaves out a name that begins with an underscore.
        label=f" {name}" if name.startswith("_") else name,
    )


def _shade(axes: Axes, iteration: Integers, low: Floats, high: Floats) -> None:
    shown = _downsampled(len(iteration))
    axes.fill_between(
        iteration[shown],
        low[shown],
        high[shown],
        color=_SEED,
        alpha=0.22,
        linewidth=0,
        label="envelope",
    )


def _downsampled(count: int) -> Integers:
    """Positions to draw of `count` points: no picture shows more, and the last is among them."""
    return np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).astype(np.int64))


def render_page(comparison: Comparison) -> str:
    parts: list[page.Part] = []
    for verdict in comparison.verdicts:
        word = "pass" if verdict.passed else "FAIL"
        parts += [
            page.Text("heading", f"{verdict.candidate.name}: {word}"),
            page.Table(
                ("criterion", "value", "bound", "", ""),
                [finding_row(finding) for finding in verdict.findings],
                numbers=frozenset({1, 2}),
            ),
        ]
    return page.render(
        page.Page(
            title="Loss parity",
            verdict=page.Verdict("pass" if comparison.passed else "FAIL", comparison.passed),
            lead=summary(comparison),
            notes=warnings(comparison),
            parts=[*parts, *curves(comparison)],
        )
    )


def curves(comparison: Comparison) -> list[page.Part]:
    """Losses, their difference and gradient norms, each with what it shows."""
    return [
        part
        for caption, drawing in panel_svgs(comparison)
        for part in (page.Figure(drawing), page.Text("caption", caption))
    ]
