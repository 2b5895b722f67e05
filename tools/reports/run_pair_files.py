"""Writes a comparison of two runs as JSON and as one HTML page.

The page needs nothing but itself: no network, no script, no file beside it. It follows the reader's
light or dark colours.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from tools.reports.run_pair import Comparison


def write_json(comparison: Comparison, path: Path) -> None:
    write_whole(path, json.dumps(comparison.as_mapping(), indent=1) + "\n")


def write_html(comparison: Comparison, path: Path) -> None:
    """Write the page. matplotlib and jinja2 are only loaded here: they take a second."""
    from tools.reports.run_pair_page import render_page

    write_whole(path, render_page(comparison))


def write_whole(path: Path, content: str) -> None:
    """Write a file under a temporary name first, so that nobody finds half a report."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
