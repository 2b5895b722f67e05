"""Writes what was found: `collectives.json`, and a table on stdout."""

from __future__ import annotations

import json
from pathlib import Path

from hetero.text import counted
from hetero.tools.collective_bench.collective_record import Point, Record
from hetero.tools.link_bench.bench_table import number, short_size
from hetero.tools.reports.page import write_whole
from hetero.tools.reports.text_table import aligned

RESULTS = "collectives.json"
_TEXT_COLUMNS = 2


def write_results(record: Record, out: Path) -> None:
    """JSON first: it cannot be had again."""
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / RESULTS, json.dumps(record.as_mapping(), indent=1) + "\n")
    print(f"wrote {out / RESULTS}")
    print(table_text(record))


def table_text(record: Record) -> str:
    """The whole run as text: a row for each operation, way and size, columns for each backend."""
    backends = list(dict.fromkeys(point.backend for point in record.points))
    across = bool(record.boundary)
    rows = [["operation", "place", "size"]]
    for name in backends:
        rows[0] += [f"{name} us", "p99", "GB/s"]
    rows[0] += (["links us", "of links"] if across else []) + ["#wrong"]
    kinds = dict.fromkeys((point.operation, point.in_place) for point in record.points)
    for operation, in_place in kinds:
        rows.append([])
        of_kind = [p for p in record.points if (p.operation, p.in_place) == (operation, in_place)]
        for nbytes in dict.fromkeys(point.nbytes for point in of_kind):
            at_size = {point.backend: point for point in of_kind if point.nbytes == nbytes}
            rows.append(
                [operation, "in" if in_place else "out", short_size(nbytes)]
                + [cell for name in backends for cell in _figures(at_size.get(name))]
                + (_beside_links(at_size) if across else [])
                + [str(sum(point.wrong for point in at_size.values()))]
            )
    table = aligned(rows, text=range(_TEXT_COLUMNS))
    return "\n".join([_heading(record), *record.notes, "", *table, "", *_explanation(record)])


def _heading(record: Record) -> str:
    facts, options = record.facts, record.options
    sides = " + ".join(
        f"{record.vendors.count(vendor)} {vendor}" for vendor in dict.fromkeys(record.vendors)
    )
    hosts = counted(len(set(record.hosts)), "host")
    return (
        f"ranks {sides} on {hosts}, {facts['device']} ({counted(facts['cores'], 'core')}), torch "
        f"{facts['torch']}, {facts['date']}; {options.dtype}, {options.reduction}"
    )


def _figures(point: Point | None) -> list[str]:
    if point is None:
        return ["", "", ""]
    return [number(point.time_us), number(point.time_p99_us), number(point.busbw_gb_s)]


def _beside_links(at_size: dict[str, Point]) -> list[str]:
    """What the links took for the bytes that cross, and that over the time of `hetero`."""
    any_point = next(iter(at_size.values()))
    ours = at_size.get("hetero")
    return [number(any_point.boundary_us), number(ours.of_boundary if ours else None)]


def _explanation(record: Record) -> list[str]:
    """What the columns are, for whoever sees only the table."""
    lines = [
        "us: median of a call, of the slowest rank; GB/s: busbw as in nccl-tests (10^9 bytes a "
        "second); sizes as in nccl-tests",
    ]
    if record.boundary:
        largest = record.boundary[-1]
        lines += [
            "links us: what the bare links took in this run for the bytes that have to cross; of "
            "links: that over hetero's us",
            f"the links ({record.boundary_transport}) at {short_size(largest.nbytes)}: "
            f"{number(largest.each_way_gb_s)} GB/s each way at once, "
            f"{number(largest.one_way_gb_s)} GB/s one way",
        ]
    return lines
