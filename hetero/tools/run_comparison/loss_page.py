"""The HTML page of a comparison of losses."""

from __future__ import annotations

from hetero.tools.reports.page import Figure, Page, Part, Table, Text, Verdict, render
from hetero.tools.run_comparison.loss_comparison import Comparison
from hetero.tools.run_comparison.loss_picture import panel_svgs
from hetero.tools.run_comparison.loss_table import finding_row, summary, warnings


def render_page(comparison: Comparison) -> str:
    parts: list[Part] = []
    for verdict in comparison.verdicts:
        word = "pass" if verdict.passed else "FAIL"
        parts += [
            Text("heading", f"{verdict.candidate.name}: {word}"),
            Table(
                ("criterion", "value", "bound", "", ""),
                [finding_row(finding) for finding in verdict.findings],
                numbers=frozenset({1, 2}),
            ),
        ]
    return render(
        Page(
            title="Loss parity",
            verdict=Verdict("pass" if comparison.passed else "FAIL", comparison.passed),
            lead=summary(comparison),
            notes=warnings(comparison),
            parts=[*parts, *curves(comparison)],
        )
    )


def curves(comparison: Comparison) -> list[Part]:
    """Losses, their difference and gradient norms, each with what it shows."""
    return [
        part
        for caption, drawing in panel_svgs(comparison)
        for part in (Figure(drawing), Text("caption", caption))
    ]
