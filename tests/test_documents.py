"""Every link in the documents leads to a file, and to a heading of it where it names one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "bench" / "README.md",
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
]
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


def prose(text: str) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(document: Path) -> frozenset[str]:
    """What may stand behind a # in a link to it, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(document.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    names = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain]
    times: Counter[str] = Counter()
    for number, name in enumerate(names):
        if times[name]:
            names[number] = f"{name}-{times[name]}"
        times[name] += 1
    return frozenset(names)


def dead_links(document: Path, text: str) -> Iterator[str]:
    for path, anchor in LINK.findall(prose(text)):
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield f"{path}#{anchor}" if anchor else path


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    assert list(dead_links(document, document.read_text())) == []


def test_a_link_to_nowhere_is_found() -> None:
    hardware = "docs/hardware.md#what-has-run-where"
    text = f"[a]({hardware}) [b](docs/none.md) [c]({hardware}s) [d](#nothing) [e](https://f.g)"
    expected = ["docs/none.md", f"{hardware}s", "#nothing"]
    assert list(dead_links(ROOT / "README.md", text)) == expected


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_lists_within_lists_look_the_same_everywhere(document: Path) -> None:
    """Code hosts take any indentation for them, the site's Markdown only four columns."""
    nested = re.findall(r"^( +)(?:[-*]|\d+\.) ", prose(document.read_text()), re.MULTILINE)
    assert {len(indentation) % 4 for indentation in nested} <= {0}
