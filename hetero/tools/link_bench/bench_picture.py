"""Bandwidth and latency over size, a line for each path; the bare limits are dashed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hetero.tools.link_bench.bench_record import Point, Record
from hetero.tools.link_bench.bench_table import short_size
from hetero.tools.reports.charts import LIGHT, PAGE, Theme, as_svg, style_axes

# Readable on a light and on a dark page alike. A limit takes the colour of what it bounds.
_COLOURS = {
    "shm": "#3b82c4",
    "tcp": "#2a9d78",
    "gloo": "#8b8f99",
    "nccl": "#6f9e1f",
    "ipc": "#d1492e",
    "verbs": "#9560c2",
    "verbs-host": "#cf8f1d",
    "auto": "#c2528b",
    "cpu-forward": "#4aa3a8",
}
_OTHER = "#8b8f99"
_SIZE_TICKS = 7


def bandwidth_svg(record: Record) -> str:
    return _svg(record, "bandwidth", _draw_bandwidth)


def latency_svg(record: Record) -> str:
    return _svg(record, "latency", _draw_latency)


def draw_png(record: Record, path: Path) -> None:
    """Both charts side by side on paper of their own."""
    figure = Figure(figsize=(13, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.patch.set_facecolor(LIGHT.paper)
    left, right = figure.subplots(1, 2)
    for axes, draw in ((left, _draw_bandwidth), (right, _draw_latency)):
        style_axes(axes, LIGHT, x_label="message")
        draw(axes, record, LIGHT)
    title = f"{record.facts['device']}, torch {record.facts['torch']}, {record.facts['date'][:10]}"
    if record.facts["simulated"]:
        title += ", simulated"
    figure.suptitle(title, color=LIGHT.ink, fontsize=11)
    handles: dict[str, Artist] = {}
    for axes in (left, right):
        lines, labels = axes.get_legend_handles_labels()
        handles |= zip(labels, lines, strict=True)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside right center",
        frameon=False,
        labelcolor=LIGHT.ink,
    )
    figure.savefig(path, format="png", dpi=110)


def _svg(record: Record, name: str, draw: Callable[[Axes, Record, Theme], None]) -> str:
    figure = Figure(figsize=(8.6, 4.4), layout="constrained")
    axes = figure.add_subplot()
    style_axes(axes, PAGE, x_label="message")
    draw(axes, record, PAGE)
    axes.legend(frameon=False, labelcolor=PAGE.ink, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return as_svg(figure, name, f"{name.capitalize()} of each path by size of the message")


def _draw_bandwidth(axes: Axes, record: Record, theme: Theme) -> None:
    _draw(axes, record, theme, lambda point: point.bandwidth_gb_s)
    axes.set_ylabel("GB/s, one way, queued")


def _draw_latency(axes: Axes, record: Record, theme: Theme) -> None:
    _draw(axes, record, theme, lambda point: point.latency_us)
    axes.set_ylabel("µs, half a round trip")


def _draw(
    axes: Axes, record: Record, theme: Theme, figure_of: Callable[[Point], float | None]
) -> None:
    colours = path_colours(record)
    for path, points in by_path(record).items():
        known = [(p.nbytes, v) for p in points if (v := figure_of(p)) is not None]
        if not known:
            continue
        is_limit = points[0].is_limit
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
    ticks = size_ticks([point.nbytes for point in record.points])
    axes.set_xticks(ticks, [short_size(nbytes) for nbytes in ticks])
    axes.xaxis.minorticks_off()
    axes.yaxis.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.label.set_color(theme.ink)


def size_ticks(sizes: Sequence[int]) -> list[int]:
    """Of the measured sizes those that get a label: on a log scale none stands in another."""
    smallest, largest = min(sizes), max(sizes)
    apart = (largest / smallest) ** (1 / _SIZE_TICKS)
    ticks = [smallest]
    for nbytes in sorted(set(sizes)):
        if nbytes > ticks[-1] and nbytes >= ticks[-1] * apart:
            ticks.append(nbytes)
    return ticks


def by_path(record: Record) -> dict[str, list[Point]]:
    """The points of each path in the order of size; transports before limits."""
    paths: dict[str, list[Point]] = {}
    for point in sorted(record.points, key=lambda point: (point.is_limit, point.nbytes)):
        paths.setdefault(point.path, []).append(point)
    return paths


def path_colours(record: Record) -> dict[str, str]:
    """A colour for each path; of several transports with one limit the first gives its colour."""
    colours = {point.path: _COLOURS.get(point.path, _OTHER) for point in record.points}
    for point in reversed(record.points):
        if point.limit in colours:
            colours[point.limit] = colours[point.path]
    return colours
