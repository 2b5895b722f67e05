"""Measure what state in memory costs a training run at every 1, 10 and 50 steps.

    python bench/memory_checkpoint_cost.py --json cost.json [--preset FILE] [--ranks 2] \
        [--intervals 1 10 50] [--pairs 8] [-- more flags of training]

For each interval one run keeps state in memory and does not by blocks of steps (on, off, off, on
and so on), so that whatever else the machine does meets both. Neighbours make a pair; its cost is
the wall time of a step with it over that without. A block has ten steps, or as many as the
interval. The time for which training stood still is told beside it; what a pair costs beyond that
is the copy and the writing, which run beside the steps and share memory and cores with them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

from bench.record_cost import ratios, run_script, summary
from hetero.errors import HeteroError
from hetero.recover.node_state import NodeState
from hetero.text import integer, size_text
from hetero.tools import tool_command_line

ROOT = Path(__file__).resolve().parents[1]
ENTRY = Path(__file__).parent / "memory_checkpoint/alternating.py"
MIXED = "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1".split()
TARGET_PERCENT, TARGET_INTERVAL = 1.0, 10
_SHORTEST_BLOCK = 10
_WARM_UP = 4
"""Blocks that are not counted."""
_SECONDS = 3600.0
"""For one run."""


@dataclass(frozen=True)
class RankBlocks:
    """What one rank's script has written."""

    blocks: list[dict[str, Any]]
    stood_still: list[float]
    """Seconds of each generation of the blocks that count."""
    bytes: int
    """Of this rank's file."""


def run_blocks(args: argparse.Namespace, interval: int) -> list[RankBlocks]:
    """The blocks of each rank of one run. Raises HeteroError if it fails."""
    steps = max(interval, _SHORTEST_BLOCK)
    iterations = (2 * args.pairs + _WARM_UP) * steps + 1
    flags = ["--train-iters", str(iterations)]
    flags += ["--hetero-memory-checkpoint-interval", str(interval), *args.flags]
    environ = {"BLOCK_STEPS": str(steps), "BLOCK_INTERVAL": str(interval)}
    with NodeState.create() as state:
        environ |= state.variables(job=state.folder.name, is_restart=False)
        written = run_script(
            ENTRY,
            flags,
            preset=args.preset,
            ranks=args.ranks,
            environ=environ,
            timeout=_SECONDS,
        )
    return [counted(one, steps=steps) for one in written]


def counted(written: dict[str, Any], *, steps: int) -> RankBlocks:
    """Of what a rank has written, the blocks after those that warm up."""
    saves = [save for save in written["saves"] if save["iteration"] > _WARM_UP * steps]
    if any(save["written_s"] is None for save in saves):
        raise HeteroError("a generation of a run failed, so it measures nothing: see its log")
    return RankBlocks(
        written["blocks"][_WARM_UP:],
        [save["stood_still_s"] for save in saves],
        max(save["bytes"] for save in saves),
    )


def cost(rank: RankBlocks, *, interval: int) -> dict[str, Any]:
    """What state in memory cost one rank: of its steps, in per cent, and of a generation."""
    steps = max(interval, _SHORTEST_BLOCK)
    off = [block["wall_seconds"] for block in rank.blocks if not block["is_on"]]
    return {
        "seconds_a_step": round(statistics.median(off) / steps, 6),
        "pairs": summary(ratios(rank.blocks, "wall_seconds")),
        "stood_still_seconds": round(statistics.median(rank.stood_still), 6),
        "bytes": rank.bytes,
        "blocks": rank.blocks,
    }


def line(interval: int, costs: Sequence[dict[str, Any]]) -> str:
    """The rank that it cost most."""
    most = max(costs, key=lambda one: one["pairs"]["median"])
    pairs, target = most["pairs"], f"; target {TARGET_PERCENT:g} %"
    return (
        f"every {interval} steps of {most['seconds_a_step'] * 1e3:.1f} ms: "
        f"{pairs['median']:+.2f} % (standard error {pairs['error']:.2f})"
        f"{target if interval == TARGET_INTERVAL else ''}; a generation of "
        f"{size_text(most['bytes'])} a rank stood still for {most['stood_still_seconds']:.4f} s"
    )


def measure(args: argparse.Namespace) -> str:
    found, lines = [], []
    for interval in args.intervals:
        costs = [cost(rank, interval=interval) for rank in run_blocks(args, interval)]
        found.append({"interval": interval, "ranks": costs})
        lines.append(line(interval, costs))
    record = {
        "command": " ".join(["python bench/memory_checkpoint_cost.py", *args.typed]),
        "hardware": f"{os.cpu_count()}-core {platform.machine()} CPU",
        "load_at_the_end": round(os.getloadavg()[0], 1),
        "simulated": args.ranks == 2,
        "intervals": found,
    }
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    return "\n".join([*lines, f"written: {args.json}"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument(
        "--preset",
        type=Path,
        default=Path("hetero/presets/tiny.yaml"),
        metavar="FILE",
        help="YAML file of the model's flags",
    )
    parser.add_argument(
        "--ranks", type=int, choices=(1, 2), default=2, help="one, or two of simulated vendors"
    )
    parser.add_argument(
        "--intervals",
        type=integer(1),
        nargs="+",
        default=[1, 10, 50],
        help="steps between two generations, one run for each",
    )
    parser.add_argument("--pairs", type=integer(2), default=8, help="pairs of blocks")
    args, flags = parser.parse_with_run_flags(argv)
    args.flags, args.typed = flags, list(sys.argv[1:] if argv is None else argv)
    tool_command_line.require_results_file(args.json, "--json")
    return tool_command_line.run(lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
