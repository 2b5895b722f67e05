"""Measure what --hetero-check-operators costs a training run on CPU.

    python bench/operator_watch_cost.py --json cost.json [--checks 50]

One run of the preset `tiny` on two ranks of simulated vendors has a check every four iterations. An
iteration with a check and the next make a block, as a check may hold up the other rank only there;
the two after it are one without. Each block with a check is compared with the mean of its two
neighbours without, so that whatever else the machine does meets both. Times are from the beginning
of a block to that of the next: what is exchanged and logged of a check is in them.

The cost at another interval is that of a check over the iterations between: the others compute the
same as without the flag.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

import itertools

from hetero.errors import HeteroError
from hetero.text import integer
from hetero.tools import tool_command_line
from hetero.tools.runs import SIMULATED

ROOT = Path(__file__).resolve().parents[1]
ENTRY = Path(__file__).parent / "operator_watch/step_times.py"
MIXED = "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1".split()
TIMES = ("wall_seconds", "cpu_seconds")
_EVERY, _BLOCK = 4, 2
_WARM_UP = 3
"""Checks that are not counted."""
_INTERVAL = 100
"""The interval that a cost is told for."""


def step_times(*, checks: int) -> list[list[dict[str, float]]]:
    """Of each rank: when each step began. Raises HeteroError if the run fails."""
    # The last check has neighbours too, and the last block an end.
    steps = (_WARM_UP + checks) * _EVERY + 2 * _BLOCK
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--yaml-cfg", "hetero/presets/tiny.yaml", "--train-iters", str(steps), *MIXED]
        flags += ["--eval-iters", "0", "--log-interval", "1000000"]
        flags += ["--hetero-check-operators", str(_EVERY)]
        flags += ["--hetero-operator-cases", str(Path(folder) / "cases")]
        command = [sys.executable, "-m", "hetero.run", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*command, str(ENTRY), *flags],
            cwd=ROOT,
            env={**os.environ, **SIMULATED, "OMP_NUM_THREADS": "1", "TIMES_FOLDER": folder},
            text=True,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise HeteroError(f"the run failed: {done.stderr[-2000:]}")
        return [json.loads((Path(folder) / f"steps_{rank}.json").read_text()) for rank in (0, 1)]


def blocks(begun: Sequence[float]) -> list[dict[str, float]]:
    """Of each check: the block with it, and the mean of its neighbours; `begun` are steps' times.

    Iterations are counted from 1: the one with a check is the last of each four.
    """
    found = []
    for check in range(_EVERY - 1, len(begun) - 2 * _BLOCK, _EVERY):
        edges = [begun[check + _BLOCK * side] for side in (-1, 0, 1, 2)]
        before, checked, after = (end - begin for begin, end in itertools.pairwise(edges))
        found.append({"with": checked, "without": (before + after) / 2})
    return found


def summary(found: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Milliseconds of a step with and without, and of a check, with the error of its median."""
    costs = [1000.0 * (each["with"] - each["without"]) for each in found]
    steps = {
        name: 1000.0 * statistics.median(each[name] for each in found) / _BLOCK
        for name in ("with", "without")
    }
    low, check, high = statistics.quantiles(costs, n=4)
    # Of a median, from the spread of the quartiles as a normal distribution has it.
    error = 1.2533 * (high - low) / 1.349 / len(costs) ** 0.5
    share = 100.0 / _INTERVAL / steps["without"]
    told = {
        "step_without_ms": steps["without"],
        "step_of_a_block_with_ms": steps["with"],
        "check_ms": check,
        "check_error_ms": error,
        "check_quartiles_ms": (low, high),
        f"per_cent_at_{_INTERVAL}": share * check,
        f"per_cent_at_{_INTERVAL}_error": share * error,
    }
    return {
        name: [round(each, 3) for each in value] if isinstance(value, tuple) else round(value, 3)
        for name, value in told.items()
    }


def measure(args: argparse.Namespace) -> str:
    ranks: list[dict[str, Any]] = []
    lines = []
    for rank, steps in enumerate(step_times(checks=args.checks)):
        pairs = {name: blocks([step[name] for step in steps])[_WARM_UP:] for name in TIMES}
        found = {name: summary(pairs[name]) for name in TIMES}
        ranks.append({"rank": rank, "summary": found, "pairs": pairs})
        lines += [f"rank {rank}, {name}: {value}" for name, value in found.items()]
    written = {
        "what": "two ranks of simulated vendors on one CPU; other work may have run there",
        "checks": args.checks,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "ranks": ranks,
    }
    args.json.write_text(json.dumps(written) + "\n")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="results")
    parser.add_argument(
        "--checks", type=integer(2), default=50, help="number of checks that are counted"
    )
    args = parser.parse_args(argv)
    tool_command_line.require_results_file(args.json, "--json")
    return tool_command_line.run(lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
