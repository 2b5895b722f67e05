"""The pictures of a run and its page: figures over the size, a line a path, bare paths dashed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hetero.tools.benchmark import report
from hetero.tools.benchmark.record import Point, Record, short_size
from hetero.tools.reports import page
from hetero.tools.reports.charts import LIGHT, PAGE, as_svg, style_axes

# Readable on a light and on a dark page alike. A limit takes the colour of what it bounds.
_COLOURS = {
    "shm": "#3b82c4",
    "tcp": "#2a9d78",
    "gloo": "#8b8f99",
    "nccl": "#6f9e1f",
    "ipc": "#d1492e",
    "hetero": "#d1492e",
    "verbs": "#9560c2",
    "verbs-host": "#cf8f1d",
    "auto": "#c2528b",
    "flagcx": "#c2528b",
    "cpu-forward": "#4aa3a8",
}
_OTHER = "#8b8f99"
_SIZE_TICKS = 7
_FIGURES: dict[str, tuple[str, Callable[[Point], float | None]]] = {
    "Bandwidth": ("GB/s, queued", lambda point: point.algbw_gb_s),
    "Latency": ("µs, one at a time", lambda point: point.latency_us),
}


def draw_png(record: Record, path: Path) -> None:
    """A row of charts for each operation, on paper of their own."""
    parts = _parts(record)
    figure = Figure(figsize=(13, 4.8 * len(parts)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.patch.set_facecolor(LIGHT.paper)
    rows = figure.subplots(len(parts), len(_FIGURES), squeeze=False)
    handles: dict[str, Artist] = {}
    for row, (title, points) in zip(rows, parts.items(), strict=True):
        for axes, name in zip(row, _FIGURES, strict=True):
            style_axes(axes, LIGHT, x_label="size")
            _draw(axes, points, name)
            axes.yaxis.label.set_color(LIGHT.ink)
            axes.set_title(title, color=LIGHT.ink, fontsize=10)
            lines, labels = axes.get_legend_handles_labels()
            handles |= zip(labels, lines, strict=True)
    facts = record.facts
    simulated = ", simulated" if facts["simulated"] else ""
    title = f"{facts['device']}, torch {facts['torch']}, {facts['date'][:10]}{simulated}"
    figure.suptitle(title, color=LIGHT.ink, fontsize=11)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside right center",
        frameon=False,
        labelcolor=LIGHT.ink,
    )
    figure.savefig(path, format="png", dpi=110)


def render_page(record: Record) -> str:
    """The page: pictures, every number, and what places them."""
    facts = [
        (name.replace("_", " "), str(value))
        for name, value in record.facts.items()
        if value is not None and name != "command"
    ]
    parts: list[page.Part] = []
    for title, points in _parts(record).items():
        parts += [page.Text("heading", title)] if title else []
        for name in _FIGURES:
            parts += [page.Text("heading", name), page.Figure(_svg(points, name, title))]
    parts.append(page.Text("caption", "Dashed: the bare path without us."))
    parts.append(page.Text("heading", "Every figure"))
    for title, points in report.sections(record).items():
        head, *rows = report.table_rows(points)
        numbers = frozenset(range(len(head))) - {report.NAME}
        parts += [page.Text("subheading", title)] if title else []
        parts.append(page.Table(head, rows, numbers=numbers))
    parts += [page.Text("caption", line) for line in report.explanation(record)]
    if record.links:
        parts.append(page.Text("heading", "The links"))
        parts += [page.Text("paragraph", line) for line in report.link_lines(record)]
    parts += [page.Text("heading", "The run"), page.Named("facts", facts)]
    parts.append(page.Text("code", str(record.facts["command"])))
    return page.render(
        page.Page(
            title=report.heading(record), notes=list(dict.fromkeys(record.notes)), parts=parts
        )
    )


def _parts(record: Record) -> dict[str, list[Point]]:
    """What has charts of its own: each operation, and with it the bare paths."""
    found = report.sections(record)
    bare = found.pop("", [])
    return {title: [*points, *bare] for title, points in found.items()} or {"": bare}


def _svg(points: Sequence[Point], name: str, title: str) -> str:
    figure = Figure(figsize=(8.6, 4.4), layout="constrained")
    axes = figure.add_subplot()
    style_axes(axes, PAGE, x_label="size")
    _draw(axes, points, name)
    axes.yaxis.label.set_color(PAGE.ink)
    axes.legend(frameon=False, labelcolor=PAGE.ink, loc="center left", bbox_to_anchor=(1.0, 0.5))
    words = " ".join(filter(None, (name, title)))
    ident = words.lower().replace(",", "").replace(" ", "-")
    return as_svg(figure, ident, f"{words} of each path by size")


def _draw(axes: Axes, points: Sequence[Point], name: str) -> None:
    label, figure_of = _FIGURES[name]
    colours = path_colours(points)
    for path in dict.fromkeys(point.name for point in points):
        own = [point for point in points if point.name == path]
        known = [(p.nbytes, value) for p in own if (value := figure_of(p)) is not None]
        if not known:
            continue
        is_limit = own[0].is_limit
        axes.plot(
            [nbytes for nbytes, _ in known],
            [value for _, value in known],
            color=colours[path],
            linewidth=1.3 if is_limit else 2,
            linestyle=(0, (4, 2.5)) if is_limit else "-",
            marker=None if is_limit and len(known) > 1 else "o",
            markersize=3.5,
            label=path,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = size_ticks([point.nbytes for point in points])
    axes.set_xticks(ticks, [short_size(nbytes) for nbytes in ticks])
    axes.xaxis.minorticks_off()
    axes.yaxis.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel(label)


def size_ticks(sizes: Sequence[int]) -> list[int]:
    """Of the measured sizes those that get a label: on a log scale none stands in another."""
    smallest, largest = min(sizes), max(sizes)
    apart = (largest / smallest) ** (1 / _SIZE_TICKS)
    ticks = [smallest]
    for nbytes in sorted(set(sizes)):
        if nbytes > ticks[-1] and nbytes >= ticks[-1] * apart:
            ticks.append(nbytes)
    return ticks


def path_colours(points: Sequence[Point]) -> dict[str, str]:
    """A colour for each path; of several transports with one limit the first gives its colour."""
    colours = {point.name: _COLOURS.get(point.name, _OTHER) for point in points}
    for point in reversed(points):
        if point.limit in colours:
            colours[point.limit] = colours[point.name]
    return colours
