"""Writes what was found: `links.json`, a table on stdout, `links.png` and `links.html`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hetero.tools.link_bench.bench_record import Point, Record
from hetero.tools.link_bench.bench_table import table_text
from hetero.tools.reports.page import write_whole


def share_of_limits(points: Sequence[Point]) -> tuple[Point, ...]:
    """Fill in each transport's bandwidth over that of the bare path that bounds it."""
    rates = {(point.path, point.nbytes): point.bandwidth_gb_s for point in points}

    def share(point: Point) -> Point:
        limit = rates.get((point.limit or "", point.nbytes))
        if not limit or point.bandwidth_gb_s is None:
            return point
        return replace(point, share_of_limit=point.bandwidth_gb_s / limit)

    return tuple(share(point) for point in points)


def write_report(record: Record, out: Path) -> None:
    """JSON first: it cannot be had again. Pictures are a line where a library is missing."""
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "links.json", json.dumps(record.as_mapping(), indent=1) + "\n")
    print(table_text(record))
    written = ["links.json", *_write_pictures(record, out)]
    print(f"wrote {', '.join(str(out / name) for name in written)}")


def _write_pictures(record: Record, out: Path) -> list[str]:
    try:
        from hetero.tools.link_bench.bench_page import render_page
        from hetero.tools.link_bench.bench_picture import draw_png
    except ImportError as error:
        print(f"no links.png and no links.html: {error.name} is not installed")
        return []
    if not record.points:
        return []
    draw_png(record, out / "links.png")
    write_whole(out / "links.html", render_page(record))
    return ["links.png", "links.html"]
