"""What training the public commands came to, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetero.observe.report import write_whole
from tools.public_training.chosen import Chosen
from tools.public_training.comparison import THREE_FLAGS, Pair
from tools.public_training.shrinking import Replacement, Shrunk

ROUNDING = 1e-3
"""Largest relative difference of losses where two layouts round differently, in 16-bit training."""


@dataclass(frozen=True)
class Row:
    """A command and its two runs, or why it has none."""

    chosen: Chosen
    shrunk: Shrunk
    pair: Pair | None = None
    problem: str = ""

    @property
    def is_right(self) -> bool:
        return self.pair is not None and self.pair.largest_difference <= ROUNDING

    @property
    def verdict(self) -> str:
        if self.pair is None:
            return self.problem
        if not self.pair.losses_equal:
            return f"losses within {self.pair.largest_difference:.1e}"
        return "losses and weights" if self.pair.weights_equal else "losses"

    @property
    def summary(self) -> str:
        return f"{self.chosen.short}: {self.verdict}"


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
        command, pair = row.chosen.command, row.pair
        path = Path(command.path)
        # A configuration's folder is its name.
        script = path.parent.name if path.name == "model_config.yaml" else path.name
        variant = f" ({command.variant})" if command.variant else ""
        cells = [
            f"{command.repository}@{command.revision}",
            f"`{script}`{variant}",
            row.chosen.uses,
            *_figures(pair),
            row.verdict,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _figures(pair: Pair | None) -> list[str]:
    if pair is None:
        return [""] * 4
    plain, mixed = pair.homogeneous, pair.mixed
    both = {plain.processes, mixed.processes}
    skipped = f", {plain.skipped} skipped" if plain.skipped else ""
    return [
        str(plain.processes) if len(both) == 1 else f"{plain.processes}, mixed {mixed.processes}",
        f"{len(plain.losses)}{skipped}",
        *(f"{run.losses[0]:.6f}, {run.losses[-1]:.6f}" for run in (plain, mixed)),
    ]


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
        "runs": asdict(row.pair) if row.pair else None,
    }
