"""The page of every report: it stands alone, and escapes what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure as Drawing

from hetero.tools.reports.charts import PAGE, as_svg, style_axes
from hetero.tools.reports.page import (
    Bar,
    Bars,
    Chain,
    ChainLink,
    Figure,
    Named,
    Page,
    Table,
    Text,
    Verdict,
    render,
    write_all,
    write_whole,
)

HOSTILE = "<script>alert('x')</script> & \"quotes\""


def chart(name: str) -> str:
    drawing = Drawing()
    axes = drawing.add_subplot()
    style_axes(axes, PAGE, x_label="iteration")
    axes.plot([1, 2], [3, 4], label="a line")
    axes.legend()
    return as_svg(drawing, name, HOSTILE)


def everything(text: str) -> Page:
    """A page with every part there is."""
    return Page(
        title=text,
        verdict=Verdict(text, True, label=text),
        lead=text,
        notes=[text],
        parts=[
            *(Text(k, text) for k in ("heading", "subheading", "paragraph", "caption", "code")),
            Figure(chart("one")),
            Figure(chart("two")),
            Table((text, "n"), [(text, "1")], numbers=frozenset({1}), foot=(text, "2")),
            Named("facts", [(text, text)]),
            Named("tiles", [(text, text)]),
            Bars([Bar(text, 50.0, text, "mixed")]),
            Chain(
                [ChainLink(text, (text,), remark=text), ChainLink(text, ())],
                above=text,
                below=text,
            ),
        ],
    )


def test_every_part_is_shown_and_escaped() -> None:
    page = render(everything(HOSTILE))
    assert "<script" not in page
    # Thrice above the parts and once as the window's title, then in each part.
    assert page.count("&lt;script&gt;") >= 4 + 5 + 3 + 2 + 2 + 2 + 6
    assert '<td class="n">1</td>' in page
    assert page.index("<tfoot>") > page.index("<tbody>")


def test_a_page_without_verdict_lead_and_notes_has_none() -> None:
    body = render(Page(title="plain", parts=[])).partition("<body>")[2]
    assert "class=" not in body


def test_it_needs_nothing_but_itself() -> None:
    page = render(everything("text"))
    targets = re.findall(r"""(?:src|href|data|poster)\s*=\s*["']([^"']*)""", page)
    assert all(target.startswith("#") for target in targets)
    assert not re.search(r"<script|<link|<iframe|@import|url\((?!#)", page)
    # The names of XML vocabularies look like addresses; nothing else does.
    assert re.sub(r'xmlns(:\w+)?="[^"]*"', "", page).count("://") == 0
    # References of a chart stay inside it.
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([\w.-]+)', page)) <= set(ids)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_whole(tmp_path / "report.html", "new")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "report.html", "\ud800")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("report.html", "new")]
    with pytest.raises(IsADirectoryError, match=f": '{tmp_path}'$"):  # and not a temporary file
        write_whole(tmp_path, "new")


def test_of_files_that_belong_together_none_is_replaced_unless_all_can_be(tmp_path: Path) -> None:
    first, blocked = tmp_path / "flags.yaml", tmp_path / "plan.yaml"
    first.write_text("old")
    blocked.mkdir()
    with pytest.raises(OSError, match=str(blocked)):
        write_all({first: "new", blocked: "new"})
    assert first.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [first, blocked]
