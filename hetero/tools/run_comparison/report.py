"""The report of a comparison of losses: `compare_loss.json`, a table, a picture and a page."""

from __future__ import annotations

import json
from pathlib import Path

from hetero.text import counted
from hetero.tools.reports.page import write_whole
from hetero.tools.reports.text_table import aligned
from hetero.tools.run_comparison.comparison import Comparison
from hetero.tools.run_comparison.criteria import Finding

STEM = "compare_loss"


def report_text(comparison: Comparison) -> str:
    """Every criterion of every candidate, and what a reader must know of the comparison."""
    lines = [summary(comparison), *warnings(comparison)]
    for verdict in comparison.verdicts:
        rows = [("criterion", "value", "bound", "", ""), *map(finding_row, verdict.findings)]
        lines += ["", f"{verdict.candidate.name}: {'pass' if verdict.passed else 'FAIL'}"]
        lines += [f"  {line}" for line in aligned(rows, text={0, 3, 4})]
    return "\n".join(lines)


def summary(comparison: Comparison) -> str:
    """What was compared with what, in one sentence."""
    reference, seeds = comparison.aligned.reference, comparison.aligned.seeds
    further = f" and {len(seeds)} further seeds of it" if seeds else ""
    return (
        f"Compared with {reference.name}{further}, over {counted(len(reference), 'iteration')} "
        f"({reference.iteration[0]} to {reference.iteration[-1]}), smoothed over "
        f"{comparison.window}."
    )


def warnings(comparison: Comparison) -> list[str]:
    """What limits the verdict, first of all that there was no envelope."""
    lines = []
    if not comparison.aligned.seeds:
        lines.append(
            "NO ENVELOPE: without --seeds nothing says how far apart two right runs may be."
        )
    if comparison.simulated:
        lines.append("Simulated: in some run one vendor's machine played another vendor.")
    return [*lines, *comparison.notes]


def finding_row(finding: Finding) -> tuple[str, str, str, str, str]:
    """Name, value, bound, verdict, and what the value is."""
    passed = {True: "pass", False: "FAIL", None: "NOT APPLIED"}[finding.passed]
    value = "" if finding.value is None else f"{finding.value:.3g}"
    bound = "" if finding.bound is None else f"{finding.bound:g}"
    return finding.criterion, value, bound, passed, finding.detail


def write_report(comparison: Comparison, out: Path) -> list[Path]:
    """Write all files into the folder, which is made; returns them."""
    # matplotlib and jinja2 take a second, which bad input need not wait for.
    from hetero.tools.run_comparison.picture import draw_png, render_page

    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{STEM}.{kind}" for kind in ("json", "png", "html")]
    write_whole(paths[0], json.dumps(comparison.as_mapping(), indent=1, allow_nan=False) + "\n")
    draw_png(comparison, paths[1])
    write_whole(paths[2], render_page(comparison))
    return paths
