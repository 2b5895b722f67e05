"""Compare the training of all supported releases of megatron-core, bit for bit.

    python bench/compare_versions.py --json versions.json
    python bench/compare_versions.py --releases 0.16.1 0.19.0 --pythons python3.12

Every release trains the preset `tiny` in each layout below, in the environments of `make
test-versions`. Losses, gradient norms and final weights of every layout are compared with those of
the oldest release on the same Python and build of PyTorch (where it could not be made, on another
Python with that build, else on the first Python), and those of the mixed pipeline with the
homogeneous one. One machine plays both vendors. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

from bench.versions.environments import (
    ROOT,
    Environment,
    NotMade,
    add_environment_flags,
    make_environments,
)
from hetero.errors import HeteroError
from hetero.tools import tool_command_line
from hetero.tools.reports.page import write_whole
from hetero.tools.runs import Launch, failure_text, run_to_end

ITERATIONS = 12
MIXED, HOMOGENEOUS = "mixed PP2", "PP2"
LAYOUTS: dict[str, tuple[int, str]] = {
    "one rank": (1, ""),
    HOMOGENEOUS: (2, "--pipeline-model-parallel-size 2"),
    MIXED: (2, "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1"),
    "TP2, SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "DP2": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16",
    ),
}
"""Processes and flags of each."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a run computed."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    weights: str
    """The SHA-256 of the last."""

    def difference(self, other: Numbers) -> float | None:
        """The largest relative difference of a loss or norm; None if all bits are equal, also of
        the weights."""
        if self == other:
            return None
        pairs = zip(
            (*self.losses, *self.grad_norms), (*other.losses, *other.grad_norms), strict=True
        )
        return max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One environment's runs, by layout, and the sentences of those that failed."""

    release: str
    python: str
    torch: str
    runs: Mapping[str, Numbers]
    failures: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.release}, Python {self.python}, torch {self.torch}"


def train(environment: Environment, layouts: Sequence[str]) -> Trained:
    runs, failures = {}, {}
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        for layout in layouts:
            nproc, flags = LAYOUTS[layout]
            launch = Launch(
                name=layout.replace(", ", "-").replace(" ", "-"),
                flags=(
                    *("--yaml-cfg", str(ROOT / "hetero/presets/tiny.yaml")),
                    *("--train-iters", str(ITERATIONS), "--log-interval", "1"),
                    *flags.split(),
                ),
                nproc=nproc,
                folder=Path(folder),
                environ={"OMP_NUM_THREADS": "1", "HETERO_VENDOR": "plan"},
                deadline=600.0,
                python=str(environment.executable),
            )
            try:
                finished = run_to_end(launch)
            except HeteroError as error:
                failures[layout] = failure_text(error, launch)
                print(f"  {layout}: {failures[layout]}", flush=True)
                continue
            runs[layout] = Numbers(
                losses=tuple(row["loss"] for row in finished.iterations),
                grad_norms=tuple(row["grad_norm"] for row in finished.iterations),
                weights=finished.report["weights"]["sha256"],
            )
            print(f"  {layout}: loss {runs[layout].losses[-1]!r}", flush=True)
    return Trained(
        release=environment.release,
        python=environment.python,
        torch=environment.torch,
        runs=runs,
        failures=failures,
    )


def reference_of(one: Trained, trained: Sequence[Trained]) -> Trained:
    """The oldest release on the same Python and PyTorch, or what comes nearest to it."""
    oldest = [other for other in trained if other.release == trained[0].release]
    same_torch = [other for other in oldest if other.torch == one.torch]
    same_python = [other for other in same_torch if other.python == one.python]
    return (same_python or same_torch or oldest)[0]


def verdicts(one: Trained, reference: Trained) -> dict[str, str]:
    """What each layout's comparison says: the table's cells."""
    cells = {}
    for layout in (*one.runs, *one.failures):
        mine, theirs = one.runs.get(layout), reference.runs.get(layout)
        if one is reference:
            cells[layout] = "reference" if mine else "failed"
        else:
            cells[layout] = _equality(mine, theirs)
    if MIXED in cells and HOMOGENEOUS in cells:
        mixed, alone = one.runs.get(MIXED), one.runs.get(HOMOGENEOUS)
        cells["mixed = homogeneous"] = _equality(mixed, alone)
    return cells


def _equality(mine: Numbers | None, theirs: Numbers | None) -> str:
    if mine is None or theirs is None:
        return "failed"
    difference = mine.difference(theirs)
    if difference is None:
        return "equal"
    return f"differs by {difference:.1e}" if difference else "weights differ"


def render(trained: Sequence[Trained]) -> str:
    """The table, in Markdown."""
    rows = [(one, reference_of(one, trained)) for one in trained]
    cells = [verdicts(one, reference) for one, reference in rows]
    columns = list(dict.fromkeys(name for row in cells for name in row))
    heads = ["megatron-core", "Python", "torch", *columns, "compared with"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (one, reference), row in zip(rows, cells, strict=True):
        beside = "" if one is reference else f"{reference.release} on {reference.python}"
        found = [row.get(name, "") for name in columns]
        lines.append(f"| {' | '.join([one.release, one.python, one.torch, *found, beside])} |")
    return "\n".join(lines)


def compare(argv: Sequence[str]) -> str:
    """Train and compare everything. Returns the line for the end."""
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    add_environment_flags(parser)
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="what to train"
    )
    options = parser.parse_args(argv)
    trained: list[Trained] = []
    not_made: list[NotMade] = []
    for made in make_environments(options.releases, options.pythons, folder=options.folder):
        print(made.name, flush=True)
        if isinstance(made, NotMade):
            print(f"  not made: {made.reason}", flush=True)
            not_made.append(made)
        else:
            trained.append(train(made, options.layouts))
        if options.json is not None:
            record = {
                "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
                "preset": "tiny",
                "iterations": ITERATIONS,
                "simulated": True,
                "layouts": LAYOUTS,
                "trained": [
                    asdict(one) | {"verdicts": verdicts(one, reference_of(one, trained))}
                    for one in trained
                ],
                "not_made": [asdict(one) for one in not_made],
            }
            write_whole(options.json, json.dumps(record, indent=1) + "\n")
    if not trained:
        raise HeteroError("none of the environments could be made")
    print(f"\n{render(trained)}\n", flush=True)
    wrong = [
        f"{one.name}: {layout} {said}"
        for one in trained
        for layout, said in verdicts(one, reference_of(one, trained)).items()
        if said not in ("equal", "reference")
    ]
    missing = set(options.releases) - {one.release for one in trained}
    wrong += [f"{release} could not be made on any Python" for release in sorted(missing)]
    if wrong:
        raise HeteroError("; ".join(wrong))
    return "all losses, gradient norms and weights are equal"


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return tool_command_line.run(lambda: compare(words))


if __name__ == "__main__":
    sys.exit(main())
