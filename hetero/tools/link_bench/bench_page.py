"""The HTML page of a run: pictures, every number, and what places them."""

from __future__ import annotations

from hetero.tools.link_bench.bench_picture import bandwidth_svg, latency_svg
from hetero.tools.link_bench.bench_record import Record
from hetero.tools.link_bench.bench_table import COLUMNS, explanation, link_lines
from hetero.tools.reports.page import Figure, Named, Page, Table, Text, render

_NAME_OF_PATH = 1
"""The column that holds no number."""


def render_page(record: Record) -> str:
    points = sorted(record.points, key=lambda point: point.nbytes)
    facts = [
        (name.replace("_", " "), str(value))
        for name, value in record.facts.items()
        if value is not None and name != "command"
    ]
    return render(
        Page(
            title=f"Links between two processes on {record.facts['device']}",
            notes=record.notes,
            parts=[
                Text("heading", "Bandwidth"),
                Figure(bandwidth_svg(record)),
                Text(
                    "caption",
                    "Messages queued back to back one way. Dashed: the bare path without us.",
                ),
                Text("heading", "Latency"),
                Figure(latency_svg(record)),
                Text("caption", "Half a round trip, both ends having the tensor in hand."),
                Text("heading", "Every figure"),
                Table(
                    [title for title, _ in COLUMNS],
                    [[cell(point) for _, cell in COLUMNS] for point in points],
                    numbers=frozenset(range(len(COLUMNS))) - {_NAME_OF_PATH},
                ),
                *(Text("caption", line) for line in explanation(record)),
                Text("heading", "The links"),
                *(Text("paragraph", line) for line in link_lines(record)),
                Text("heading", "The run"),
                Named("facts", facts),
                Text("code", str(record.facts["command"])),
            ],
        )
    )
