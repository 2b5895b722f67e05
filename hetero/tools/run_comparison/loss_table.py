"""A comparison of losses in words: the table, and what a reader must know of it."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.text import counted
from hetero.tools.run_comparison.criteria import Finding
from hetero.tools.run_comparison.loss_comparison import Comparison


def report_text(comparison: Comparison) -> str:
    """Every criterion of every candidate, and what a reader must know of the comparison."""
    lines = [summary(comparison), *warnings(comparison)]
    for verdict in comparison.verdicts:
        rows = [("criterion", "value", "bound", "", ""), *map(finding_row, verdict.findings)]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines += ["", f"{verdict.candidate.name}: {'pass' if verdict.passed else 'FAIL'}"]
        lines += [_line(row, widths) for row in rows]
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


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    name, value, bound, passed = (
        f"{cell:>{width}}" if i in (1, 2) else f"{cell:<{width}}"
        for i, (cell, width) in enumerate(zip(row, widths, strict=False))
    )
    return f"  {name}  {value}  {bound}  {passed}  {row[4]}".rstrip()
