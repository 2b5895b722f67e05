"""Tables as text: columns for a terminal, and Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def aligned(rows: Sequence[Sequence[str]], *, text: Collection[int] | None = None) -> list[str]:
    """A line for each row, numbers at the right and the columns in `text`, or all, at the left.

    An empty row is an empty line.
    """
    full = [row for row in rows if row]
    widths = [max(len(row[column]) for row in full) for column in range(len(full[0]))]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=False)
        return "  ".join(
            f"{cell:<{width}}" if text is None or column in text else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(cells)
        ).rstrip()

    return [line(row) for row in rows]


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, without a line feed at its end."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (headings, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(headings), *lines[1:]])
