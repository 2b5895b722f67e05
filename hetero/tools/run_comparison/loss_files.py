"""Writes a comparison of losses: `compare_loss.json`, a picture and a page."""

from __future__ import annotations

import json
from pathlib import Path

from hetero.tools.reports.page import write_whole
from hetero.tools.run_comparison.loss_comparison import Comparison

STEM = "compare_loss"


def write_report(comparison: Comparison, out: Path) -> list[Path]:
    """Write all files into the folder, which is made; returns them."""
    # matplotlib and jinja2 take a second, which bad input need not wait for.
    from hetero.tools.run_comparison.loss_page import render_page
    from hetero.tools.run_comparison.loss_picture import draw_png

    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{STEM}.{kind}" for kind in ("json", "png", "html")]
    write_whole(paths[0], json.dumps(comparison.as_mapping(), indent=1, allow_nan=False) + "\n")
    draw_png(comparison, paths[1])
    write_whole(paths[2], render_page(comparison))
    return paths
