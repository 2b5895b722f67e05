"""report.html: the plan, its pipeline drawn, what was compared, and plots of what would change."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from hetero.planner.bottleneck import explain_bottleneck
from hetero.planner.schedule_picture import colours_of, draw_schedule
from hetero.planner.solution import SimulatedPlan, Solution
from hetero.text import seconds_text
from hetero.tools.planning.planning_request import PlanningRequest
from hetero.tools.planning.solution_table import (
    MESH_HEAD,
    PLAN_HEAD,
    comparison_lines,
    headline,
    mesh_rows,
    one_line,
    plan_rows,
    search_sentence,
)
from hetero.tools.planning.what_if import Sweep
from hetero.tools.reports.page import Figure, Named, Page, Part, Table, Text, render

_SWEPT = "#7a5fb0"
"""Of a plotted line, which is no vendor's."""
_DRAWN = 3
"""How many plans are drawn."""


def render_solution(
    request: PlanningRequest, found: Solution, sweeps: Sequence[Sweep], *, command: Sequence[str]
) -> str:
    first = found.best.first
    kinds = {kind.name: kind.vendor for kind in request.problem.cluster.kinds}
    colours = colours_of(kinds)
    by_vendor = {kinds[kind]: colours[kind] for kind in reversed(kinds)}  # its first kind's
    return render(
        Page(
            title=f"A plan for {request.model_name}",
            lead=headline(request, found),
            notes=["Everything here is predicted; nothing has been run."],
            parts=[
                Table(
                    MESH_HEAD,
                    mesh_rows(first, request.problem.options.fp8.format),
                    numbers=frozenset({1, 3, 4, 5, 7, 10}),
                ),
                *(Text("paragraph", line) for line in explain_bottleneck(request.problem, first)),
                Text("heading", "Together and alone"),
                *(Text("paragraph", line) for line in comparison_lines(found)),
                Text("heading", "The next best plans"),
                Table(PLAN_HEAD, plan_rows(found), numbers=frozenset({1, 2, 3})),
                *_pictures(found.best.plans[:_DRAWN], colours),
                *(part for sweep in sweeps for part in _plot(sweep, by_vendor)),
                Text("heading", "Where the numbers come from"),
                Named("facts", [tuple(line.split(": ", 1)) for line in request.sources]),  # type: ignore[misc]
                Text("paragraph", search_sentence(found)),
                Text("code", shlex.join(command)),
            ],
        )
    )


def _pictures(planned: Sequence[SimulatedPlan], colours: Mapping[str, str]) -> list[Part]:
    parts: list[Part] = [Text("heading", "One step, drawn")]
    for one in planned:
        parts.append(Text("subheading", one_line(one)))
        parts.append(Figure(draw_schedule(one.costs, one.prediction, colours)))
        kinds = dict.fromkeys(one.placement.kinds)
        busy = ", ".join(
            f"{kind} computes {one.prediction.utilization([kind]):.0%}" for kind in kinds
        )
        step = seconds_text(one.seconds)
        parts.append(Text("caption", f"Of {step}, {busy}; the rest is bubble."))
    return parts


def _plot(sweep: Sweep, colours: Mapping[str, str]) -> list[Part]:
    return [
        Text("heading", sweep.title),
        Figure(draw_sweep(sweep, colours)),
        Text("caption", sweep.caption),
    ]


def draw_sweep(sweep: Sweep, colours: Mapping[str, str]) -> str:
    """The plot of a sweep as SVG; what does not fit anywhere is left out.

    `colours`: of lines that are a vendor's.
    """
    # Drawing is what takes longest to import, and most answers have no plot.
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import MaxNLocator

    from hetero.tools.reports.charts import PAGE, as_svg, style_axes

    figure = Canvas(figsize=(8.6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    points = [(x, y) for x, y in zip(sweep.x, sweep.y, strict=True) if y]
    axes.plot(
        [x for x, _ in points], [y for _, y in points], color=_SWEPT, marker="o", markersize=4
    )
    not_fitting = [(x, y) for x, y in points if x in sweep.not_fitting]
    axes.plot(
        [x for x, _ in not_fitting],
        [y for _, y in not_fitting],
        linestyle="none",
        marker="o",
        markersize=4,
        markerfacecolor="white",
        markeredgecolor=_SWEPT,
    )
    for number, line in enumerate(sweep.levels):
        of_vendor = [colour for vendor, colour in colours.items() if vendor in line.name.split()]
        colour = of_vendor[0] if of_vendor else ("#4c78a8", "#2a9d8f", "#b279a2")[number % 3]
        axes.axhline(line.value, color=colour, linestyle="--", linewidth=1.2, label=line.name)
    style_axes(axes, PAGE, x_label=sweep.x_label)
    axes.set_ylabel(sweep.y_label)
    axes.set_ylim(bottom=0)
    if sweep.log_x:
        axes.set_xscale("log", base=2)
    elif all(float(x).is_integer() for x in sweep.x):
        # There is no half a node.
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if sweep.levels:
        axes.legend(frameon=False, labelcolor=PAGE.ink)
    name = "".join(letter if letter.isalnum() else "-" for letter in sweep.title.lower())
    return as_svg(figure, name, f"{sweep.title}: {sweep.y_label} over {sweep.x_label}")
