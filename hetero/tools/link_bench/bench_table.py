"""What was found, in words: the table, what its columns are, and the links it is of."""

from __future__ import annotations

from collections.abc import Callable

from hetero.text import counted, size_text
from hetero.tools.link_bench.bench_record import LinkFacts, Point, Record
from hetero.tools.reports.text_table import aligned

Column = tuple[str, Callable[[Point], str]]
_NAME_OF_PATH = 1
"""The column that holds no number."""


def table_text(record: Record) -> str:
    """The whole run as text."""
    sections = [_heading(record), *record.notes, ""]
    rows = [[title for title, _ in COLUMNS]]
    for nbytes in sorted({point.nbytes for point in record.points}):
        if len(rows) > 1:
            rows.append([])
        at_size = [point for point in record.points if point.nbytes == nbytes]
        rows += [[cell(point) for _, cell in COLUMNS] for point in at_size]
    sections += aligned(rows, text={_NAME_OF_PATH})
    sections += ["", *explanation(record), *link_lines(record)]
    return "\n".join(sections)


def _heading(record: Record) -> str:
    facts, options = record.facts, record.options
    slots = short_size(options.chunk_bytes) if options.chunk_bytes else "as suits each"
    return (
        f"two processes on {facts['device']} ({counted(facts['cores'], 'core')}), torch "
        f"{facts['torch']}, "
        f"{facts['date']}; ring {short_size(options.ring_bytes)} a link, slots {slots}"
    )


def explanation(record: Record) -> list[str]:
    """What the columns are, for whoever sees only the table."""
    return [
        "latency: half a round trip, both ends having the tensor in hand; after idle: one way "
        "after 50 ms without a message",
        "GB/s: messages queued back to back one way, then one wait (10^9 bytes a second); both: a "
        "message each way at once, together",
        "p99: the slow end of the samples; CPU: of the whole process for one message, sender + "
        "receiver; of limit: GB/s over the bare path's",
    ]


def link_lines(record: Record) -> list[str]:
    """Memory of each link and CPU use of all while idle."""
    lines = [_link_line(link) for link in record.links]
    if record.idle is not None:
        used, before = record.idle.with_links, record.idle.without_links
        lines.append(
            f"idle for {record.idle.seconds:g} s with {counted(len(record.links), 'link')} open: "
            f"{100 * used[0]:.2f} % and {100 * used[1]:.2f} % of a core; without links "
            f"{100 * before[0]:.2f} % and {100 * before[1]:.2f} %"
        )
    return lines


def _link_line(link: LinkFacts) -> str:
    host = "unknown" if link.host_bytes is None else size_text(link.host_bytes)
    line = (
        f"{link.path}: {link.transport}, opened in {link.open_seconds:.2f} s, holds {host} of host "
        f"memory and {size_text(link.device_bytes)} of GPU memory in both processes"
    )
    return f"{line} ({'; '.join(link.passed_over)})" if link.passed_over else line


def short_size(nbytes: int) -> str:
    """A size as it was asked for: 64 KiB, and not 64.0 KiB."""
    return size_text(nbytes).replace(".00 ", " ").replace(".0 ", " ")


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


COLUMNS: tuple[Column, ...] = (
    ("size", lambda point: short_size(point.nbytes)),
    ("path", lambda point: point.path),
    ("latency us", lambda point: number(point.latency_us)),
    ("p99", lambda point: number(point.latency_p99_us)),
    ("after idle", lambda point: number(point.after_idle_us)),
    ("p99", lambda point: number(point.after_idle_p99_us)),
    ("GB/s", lambda point: number(point.bandwidth_gb_s)),
    ("p99", lambda point: number(point.bandwidth_p99_gb_s)),
    ("both GB/s", lambda point: number(point.both_gb_s)),
    ("p99", lambda point: number(point.both_p99_gb_s)),
    ("CPU us", _cpu),
    ("of limit", lambda point: number(point.share_of_limit)),
)
