"""The report of a run: perf.json, a table on stdout as nccl-tests has it, a picture and a page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hetero.text import counted, size_text
from hetero.tools.benchmark.record import (
    FILE,
    CollectiveOptions,
    LinkFacts,
    LinkOptions,
    Point,
    Record,
    short_size,
)
from hetero.tools.reports.page import write_whole
from hetero.tools.reports.text_table import aligned

NAME = 1
"""The column that holds no number."""
_EXPLAINED = {
    "latency us": "latency: one at a time; of a link half a round trip, both ends having the "
    "tensor in hand",
    "after idle": "after idle: one way after 50 ms without a message",
    "time us": "time: one of several that were queued before one wait; p99: the slow end",
    "algbw": "algbw, busbw, both: GB/s (10^9 bytes a second), the first two as in nccl-tests, the "
    "last of a message each way at once, together",
    "CPU us": "CPU: of the whole process for one message, sender + receiver",
    "limit us": "limit: what the bare path took in this run for the bytes that have to cross; of "
    "limit: that over the time",
}


def write_report(record: Record, out: Path) -> None:
    """JSON first: it cannot be had again. Pictures are a line where a library is missing."""
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / FILE, json.dumps(record.as_mapping(), indent=1) + "\n")
    print(table_text(record))
    written = [FILE, *_write_pictures(record, out)]
    print(f"wrote {', '.join(str(out / name) for name in written)}")


def _write_pictures(record: Record, out: Path) -> list[str]:
    try:
        from hetero.tools.benchmark import picture
    except ImportError as error:
        print(f"no perf.png and no perf.html: {error.name} is not installed")
        return []
    if not record.points:
        return []
    picture.draw_png(record, out / "perf.png")
    write_whole(out / "perf.html", picture.render_page(record))
    return ["perf.png", "perf.html"]


def table_text(record: Record) -> str:
    """The whole run as text: a table of each operation, sizes below one another."""
    lines = [heading(record), *dict.fromkeys(record.notes)]
    for title, points in sections(record).items():
        head, *rows = table_rows(points)
        spaced = [head]
        for size in dict.fromkeys(row[0] for row in rows):
            # A line is free before each size but the first.
            spaced += [[]] * (len(spaced) > 1) + [row for row in rows if row[0] == size]
        lines += ["", *([f"# {title}"] if title else []), *aligned(spaced, text={NAME})]
    return "\n".join([*lines, "", *explanation(record), *link_lines(record)])


def heading(record: Record) -> str:
    """Who measured, on what, and how."""
    facts, options = record.facts, record.options
    sides = [f"{facts['vendors'].count(v)} {v}" for v in dict.fromkeys(facts["vendors"])]
    how = ""
    if isinstance(options, CollectiveOptions):
        how = f"; {options.dtype}, {options.reduction}"
    if isinstance(options, LinkOptions):
        slots = short_size(options.chunk_bytes) if options.chunk_bytes else "as suits each"
        how = f"; ring {short_size(options.ring_bytes)} a link, slots {slots}"
    return (
        f"ranks {' + '.join(sides)} on {counted(len(set(facts['hosts'])), 'host')}, "
        f"{facts['device']} ({counted(facts['cores'], 'core')}), torch {facts['torch']}, "
        f"{facts['date']}{how}"
    )


def sections(record: Record) -> dict[str, list[Point]]:
    """Points by operation, by size, what is measured before what bounds it."""
    found: dict[str, list[Point]] = {}
    for point in sorted(record.points, key=lambda point: (point.nbytes, point.is_limit)):
        place = "" if point.in_place is None else "in place" if point.in_place else "out of place"
        kind = ", ".join(filter(None, (point.operation, place)))
        found.setdefault(kind, []).append(point)
    # The bare links are of no operation, and of all.
    return {kind: found[kind] for kind in sorted(found, key=lambda kind: not kind)}


def table_rows(points: list[Point]) -> list[list[str]]:
    """A head and a row a point, without the columns of which no point has a figure."""
    rows = [[title, *(cell(point) for point in points)] for title, cell in _COLUMNS]
    used = [column for column in rows if any(column[1:])]
    return [list(row) for row in zip(*used, strict=True)]


def explanation(record: Record) -> list[str]:
    """What the columns are, for whoever sees only the table."""
    shown = table_rows(record.points)[0] if record.points else []
    return [text for title, text in _EXPLAINED.items() if title in shown]


def link_lines(record: Record) -> list[str]:
    """Memory of each link and CPU use of all while idle."""
    lines = [_link_line(link) for link in record.links]
    if (idle := record.idle_cores) is not None:
        used, before = (
            " and ".join(f"{100 * cores:.2f} %" for cores in idle[when])
            for when in ("with_links", "without_links")
        )
        lines.append(
            f"idle for {idle['seconds']:g} s with {counted(len(record.links), 'link')} open: "
            f"{used} of a core; without links {before}"
        )
    return lines


def _link_line(link: LinkFacts) -> str:
    host = "unknown" if link.host_bytes is None else size_text(link.host_bytes)
    line = (
        f"{link.path}: {link.transport}, opened in {link.open_seconds:.2f} s, holds {host} of host "
        f"memory and {size_text(link.device_bytes)} of GPU memory in both processes"
    )
    return f"{line} ({'; '.join(link.passed_over)})" if link.passed_over else line


def number(value: float | None) -> str:
    """About three digits, and never an exponent: these are read in columns."""
    if value is None:
        return ""
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 4
    return f"{value:.{decimals}f}"


def _cpu(point: Point) -> str:
    if point.cpu_send_us is None or point.cpu_recv_us is None:
        return ""
    return f"{number(point.cpu_send_us)} + {number(point.cpu_recv_us)}"


_COLUMNS: tuple[tuple[str, Callable[[Point], str]], ...] = (
    ("size", lambda point: short_size(point.nbytes)),
    ("path", lambda point: point.name),
    ("latency us", lambda point: number(point.latency_us)),
    ("p99", lambda point: number(point.latency_p99_us)),
    ("after idle", lambda point: number(point.after_idle_us)),
    ("p99", lambda point: number(point.after_idle_p99_us)),
    ("time us", lambda point: number(point.time_us)),
    ("p99", lambda point: number(point.time_p99_us)),
    ("algbw", lambda point: number(point.algbw_gb_s)),
    ("busbw", lambda point: number(point.busbw_gb_s)),
    ("both", lambda point: number(point.both_gb_s)),
    ("CPU us", _cpu),
    ("limit us", lambda point: number(point.limit_us)),
    ("of limit", lambda point: number(point.share_of_limit)),
    ("#wrong", lambda point: "" if point.wrong is None else str(point.wrong)),
)
