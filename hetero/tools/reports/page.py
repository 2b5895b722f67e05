"""The page that every report is: parts put into one template, and files written whole.

A page needs nothing but itself: no network, no script, no file beside it. It follows the reader's
light or dark colours, and escapes all it is given but the drawings.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TEMPLATE = Path(__file__).with_suffix(".html")
Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Text:
    """A line of text; `kind` is heading, subheading, paragraph, caption or code."""

    kind: str
    text: str


@dataclass(frozen=True)
class Figure:
    """A drawing of ours as an SVG element, whose own text its drawer has escaped."""

    drawing: str
    kind: str = "figure"


@dataclass(frozen=True)
class Table:
    """Rows below a head; the columns in `numbers` stand at the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()
    foot: Sequence[str] = ()
    kind: str = "table"


@dataclass(frozen=True)
class Named:
    """Names and values: as a list (`facts`) or as large figures (`tiles`)."""

    kind: str
    pairs: Pairs


@dataclass(frozen=True)
class Bar:
    """One of several bars, `share` per cent long. `look` is `mixed` or `baseline`."""

    name: str
    share: float
    text: str
    look: str


@dataclass(frozen=True)
class Bars:
    bars: Sequence[Bar]
    kind: str = "bars"


@dataclass(frozen=True)
class ChainLink:
    """A box: a name, what is remarked of it, and lines below."""

    name: str
    lines: Sequence[str]
    remark: str = ""


@dataclass(frozen=True)
class Chain:
    """Boxes in a row, and what stands above and below the arrow between two of them."""

    links: Sequence[ChainLink]
    above: str
    below: str
    kind: str = "chain"


@dataclass(frozen=True)
class Verdict:
    """A word that says whether all is well, after a label that says of what."""

    word: str
    good: bool
    label: str = ""


Part = Text | Figure | Table | Named | Bars | Chain


@dataclass(frozen=True)
class Page:
    """A report from its title to its last part."""

    title: str
    parts: Sequence[Part]
    verdict: Verdict | None = None
    lead: str = ""
    notes: Sequence[str] = ()


def render(page: Page) -> str:
    """The page as HTML."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(page=page)


def write_whole(path: Path, content: str) -> None:
    """Write a file under a temporary name first, so that nobody finds half a report."""
    write_all({path: content})


def write_all(contents: Mapping[Path, str]) -> None:
    """The same for files that belong together: none is replaced before all are written."""
    temporary = {path: path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in contents}
    path = Path()
    try:
        for path, content in contents.items():
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            temporary[path].write_text(content, encoding="utf-8")
        for path in contents:
            temporary[path].replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        for one in temporary.values():
            one.unlink(missing_ok=True)
