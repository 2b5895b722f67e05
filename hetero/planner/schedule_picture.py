"""A simulated step as an SVG Gantt chart: a row per stage, a colour per kind of node."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from xml.sax.saxutils import escape

from hetero.planner.prediction import Prediction
from hetero.planner.schedule_timeline import REDUCE, UPDATE, Row, rows
from hetero.planner.step_costs import StepCosts
from hetero.text import seconds_text

_WIDTH, _LEFT, _ROW, _GAP, _TOP = 1200, 190, 22, 6, 26
_OTHERS = ("#4c78a8", "#b279a2", "#8d6e63", "#d4a017", "#e08214", "#17a2b8")
_NAMED = {
    "green": "#2e8b57",
    "red": "#d1402e",
    "blue": "#4c78a8",
    "orange": "#e08214",
    "yellow": "#d4a017",
    "purple": "#8e5ea2",
    "brown": "#8d6e63",
    "nvidia": "#2e8b57",
    "amd": "#d1402e",
}
"""Colours that a node's name, or its vendor's, stands for."""
_OVERHEAD = {UPDATE: "#9aa0a6", REDUCE: "#5f6368"}
_MIN_LABEL_WIDTH = 14
"""Minimum width in pixels of a pass that is labelled with its micro-batch."""


def colours_of(vendors: Mapping[str, str]) -> dict[str, str]:
    """A colour for each kind of node, given with its vendor; the same in every picture of a report.

    That of its name, as of `red` or `rack-blue`, else its vendor's; where another kind has it
    already, one that is left.
    """
    found: dict[str, str] = {}
    words: tuple[Callable[[str], str], ...] = (_colour_word, vendors.__getitem__)
    for word_of in words:
        for kind in vendors:
            colour = _NAMED.get(word_of(kind), "")
            if kind not in found and colour and colour not in found.values():
                found[kind] = colour
    left = [colour for colour in _OTHERS if colour not in found.values()] or list(_OTHERS)
    others = [kind for kind in vendors if kind not in found]
    found |= {kind: left[number % len(left)] for number, kind in enumerate(others)}
    return found


def _colour_word(kind: str) -> str:
    words = re.split(r"[^a-z]+", kind.lower())
    return next((word for word in words if word in _NAMED), "")


def draw_schedule(costs: StepCosts, prediction: Prediction, colours: Mapping[str, str]) -> str:
    """The chart as an SVG element; forward passes are lighter than backward passes.

    `colours`: of each kind of node. Links are left to the trace.
    """
    lines = [row for row in rows(costs, prediction) if row.kind]
    kinds = list(dict.fromkeys(row.kind for row in lines))
    height = _TOP + len(lines) * (_ROW + _GAP) + 40
    scale = (_WIDTH - _LEFT - 10) / prediction.seconds
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="inherit" font-size="12" fill="currentColor">',
        f"<title>One step of {seconds_text(prediction.seconds)}</title>",
        *_legend({kind: colours[kind] for kind in kinds}),
    ]
    for number, row in enumerate(lines):
        top = _TOP + number * (_ROW + _GAP)
        colour = colours[row.kind]
        parts.append(f'<text x="4" y="{top + 15}">{escape(row.label)}</text>')
        parts += _boxes(row, top, scale, colour)
    parts += _axis(prediction.seconds, scale, height - 30)
    return "\n".join([*parts, "</svg>"])


def _legend(colours: Mapping[str, str]) -> Iterator[str]:
    left = _LEFT
    for kind, colour in colours.items():
        for opacity, what in (("0.45", f"{kind} forward"), ("0.95", "backward")):
            yield f'<rect x="{left}" y="4" width="12" height="12" {_fill(colour, opacity)}/>'
            yield f'<text x="{left + 16}" y="14">{escape(what)}</text>'
            left += 30 + 7 * len(what)
    for what, colour in _OVERHEAD.items():
        yield f'<rect x="{left}" y="4" width="12" height="12" {_fill(colour, "0.95")}/>'
        yield f'<text x="{left + 16}" y="14">{what}</text>'
        left += 30 + 7 * len(what)


def _fill(colour: str, opacity: str) -> str:
    return f'fill="{colour}" fill-opacity="{opacity}"'


def _boxes(row: Row, top: int, scale: float, colour: str) -> Iterator[str]:
    for what, micro_batch, chunk, start, end in row.spans:
        left, width = _LEFT + start * scale, (end - start) * scale
        if width <= 0:
            continue
        opacity = "0.45" if what == "forward" else "0.95"
        # Offset the chunks of an interleaved stage to distinguish them.
        lift = min(chunk, 3) * 4
        yield (
            f'<rect x="{left:.2f}" y="{top + lift}" width="{width:.2f}" height="{_ROW - lift}" '
            f'{_fill(_OVERHEAD.get(what, colour), opacity)} stroke="currentColor" '
            'stroke-width="0.3"/>'
        )
        if width >= _MIN_LABEL_WIDTH and what not in _OVERHEAD:
            yield (
                f'<text x="{left + width / 2:.2f}" y="{top + 15}" font-size="9" '
                f'text-anchor="middle">{micro_batch}</text>'
            )


def _axis(seconds: float, scale: float, top: int) -> Iterator[str]:
    for part in range(5):
        at = seconds * part / 4
        anchor = "end" if part == 4 else "middle"
        yield (
            f'<text x="{_LEFT + at * scale:.1f}" y="{top + 14}" text-anchor="{anchor}">'
            f"{at:.3g} s</text>"
        )
