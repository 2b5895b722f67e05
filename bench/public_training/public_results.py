"""What training the public commands came to, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.public_training.chosen import Chosen
from bench.public_training.shrinking import Replacement, Shrunk
from bench.public_training.trained_commands import THREE_FLAGS, Runs
from hetero.tools.reports.page import write_whole
from hetero.tools.run_comparison.alignment import BitwiseComparison
from hetero.tools.run_comparison.curves import Curve

ROUNDING = 1e-4
"""Most that losses of 16-bit training may differ by where two layouts add in another order."""
ROUNDING_OF_FP8 = 2e-2
"""The same where the two have other layouts or types of fp8, and so other factors."""


@dataclass(frozen=True)
class Row:
    """A command and its two runs, or why it has none."""

    chosen: Chosen
    shrunk: Shrunk
    runs: Runs | None = None
    problem: str = ""

    @property
    def is_right(self) -> bool:
        if self.runs is None:
            return False
        one_type = self.runs.from_one_type
        if one_type is not None:
            apart = max(self.runs.from_own.relative_losses, self.runs.from_staged.relative_losses)
            return one_type.identical and apart <= ROUNDING_OF_FP8
        return self.runs.from_staged.identical and self.runs.from_own.relative_losses <= ROUNDING

    @property
    def verdict(self) -> str:
        if self.runs is None:
            return self.problem
        own, staged = self.runs.from_own, self.runs.from_staged
        if (one_type := self.runs.from_one_type) is not None:
            return f"of one type: {_words(one_type)}; of two: {_words(staged)}"
        if own.identical and staged.identical:
            return "all"
        return f"{_words(own)}; of the same stages: {_words(staged)}"

    @property
    def summary(self) -> str:
        return f"{self.chosen.short}: {self.verdict}"


def _words(bitwise: BitwiseComparison) -> str:
    """What is equal, and within what the rest is."""
    if bitwise.identical:
        return "all"
    losses, norms = bitwise.relative_losses, bitwise.relative_grad_norms
    parts = [f"losses within {losses:.0e}" if losses else "losses"]
    parts += ["weights"] if bitwise.weights_identical else []
    parts += [f"gradient norms within {norms:.0e}"] if norms else []
    return ", ".join(parts)


def write_results(rows: Sequence[Row], out: Path) -> None:
    write_whole(out / "results.md", "\n".join([*table(rows), "", *replacements(rows), ""]))
    record = {"three_flags": THREE_FLAGS, "commands": [_as_mapping(row) for row in rows]}
    write_whole(out / "results.json", json.dumps(record, indent=1) + "\n")


def table(rows: Sequence[Row]) -> list[str]:
    """A row in Markdown for each command."""
    lines = [
        "| source | script | what it uses | processes | iterations | homogeneous, first and last "
        "loss | mixed (simulated) | equal, bit for bit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        command = row.chosen.command
        path = Path(command.path)
        # A configuration's folder is its name.
        script = path.parent.name if path.name == "model_config.yaml" else path.name
        variant = f" ({command.variant})" if command.variant else ""
        cells = [
            f"{command.repository}@{command.revision}",
            f"`{script}`{variant}",
            row.chosen.uses,
            *_figures(row.runs),
            row.verdict,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _figures(runs: Runs | None) -> list[str]:
    if runs is None:
        return [""] * 4
    plain, mixed = runs.homogeneous, runs.mixed
    own, spread = runs.processes
    skipped = f", {plain.skipped.sum()} skipped" if plain.skipped.any() else ""
    return [
        str(own) if own == spread else f"{own}, mixed {spread}",
        f"{len(plain)}{skipped}",
        *(_first_and_last(run) for run in (plain, mixed)),
    ]


def _first_and_last(run: Curve) -> str:
    return f"{run.loss[0]:.6f}, {run.loss[-1]:.6f}"


def replacements(rows: Sequence[Row]) -> list[str]:
    """What was replaced in each command, as it was written and as it was used."""
    lines = ["| command | what was replaced, as it was written and as it was used |", "|---|---|"]
    for row in rows:
        changes = "; ".join(_change(one) for one in row.shrunk.replaced)
        gpus = f"{row.chosen.command.gpus} GPUs → {row.shrunk.processes} processes"
        lines.append(f"| {row.chosen.short} | {gpus}; {changes} |")
    return lines


def _change(one: Replacement) -> str:
    return f"`{one.flag}` {one.written} → {one.used}"


def _as_mapping(row: Row) -> dict[str, Any]:
    return {
        "name": row.chosen.name,
        "words": row.shrunk.words,
        "replaced": [asdict(one) for one in row.shrunk.replaced],
        "verdict": row.verdict,
        "runs": row.runs.as_mapping() if row.runs else None,
    }
