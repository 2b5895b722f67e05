"""Measure goodput while ranks are killed: state in memory beside checkpoints on disk.

    python bench/goodput.py --json goodput.json [--minutes 30] [--every 120] [--seed 1] [-- FLAGS]

Runs of pretrain_gpt.py on GPUs, or on CPU: a tiny model on real text, or the model of FLAGS, in two
stages of *simulated* vendors with --replicas ranks each. In each interval of --every seconds a rank
is killed; which one and when is drawn with the seed, the same for all sides. They run one after the
other:

    hetero-restarts   --hetero-restarts, state in memory
    max-restarts      --max-restarts, checkpoints on disk

Goodput is measured from outside: the sum of the times of all iterations in --metrics-file at the
end, each counted once, over the time since the launcher was started.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script(core=False)

from bench.real_text.data_set import RealText, build_real_text
from bench.restart_times import state_flags
from bench.restarts.job import VENDORS, TrainingJob, about
from hetero.text import counted, integer, number
from hetero.tools import tool_command_line

SIDES = ("hetero-restarts", "max-restarts")
TARGET = 0.9
_RESTARTS = 1000
_MEMORY_INTERVAL = 10


def faults(
    *, seconds: float, every: float, seed: int, ranks: int = len(VENDORS)
) -> list[tuple[float, int]]:
    """When a rank is killed, in seconds, and which: one in each whole interval."""
    drawn = random.Random(seed)
    return [
        ((interval + drawn.random()) * every, drawn.randrange(ranks))
        for interval in range(int(seconds // every))
    ]


def measure(
    side: str, data: RealText, args: argparse.Namespace, *, flags: Sequence[str]
) -> dict[str, Any]:
    """One side's run."""
    seconds, in_memory = 60.0 * args.minutes, side == SIDES[0]
    with tempfile.TemporaryDirectory(prefix="goodput-") as name:
        with TrainingJob(
            Path(name),
            data,
            launcher=[f"--{side}", str(_RESTARTS)],
            flags=[
                *state_flags(
                    Path(name),
                    in_memory=in_memory,
                    interval=_MEMORY_INTERVAL if in_memory else args.save_interval,
                ),
                *flags,
            ],
            replicas=args.replicas,
        ) as job:
            kills = []
            ranks = args.replicas * len(VENDORS)
            for due, rank in faults(seconds=seconds, every=args.every, seed=args.seed, ranks=ranks):
                time.sleep(max(0.0, job.began + due - time.monotonic()))
                before = job.steps.last()
                at = job.kill_rank(rank)
                kills.append({"seconds": round(at - job.began, 3), "rank": rank, "after": before})
                print(f"{side}: rank {rank} killed after {at - job.began:.1f} s", flush=True)
            time.sleep(max(0.0, job.began + seconds - time.monotonic()))
            wall = time.monotonic() - job.began
            spent, first = dict(job.steps.seconds), min(job.steps.seen.values(), default=job.began)
            told = job.state()
        kept = {iteration: s for iteration, s in spent.items() if iteration <= job.steps.current}
        return {
            "goodput": round(sum(kept.values()) / wall, 4),
            "goodput_since_first_step": round(sum(kept.values()) / (wall - first + job.began), 4),
            "steps": len(kept),
            "kept_seconds": round(sum(kept.values()), 3),
            "wall_seconds": round(wall, 3),
            "kills": kills,
            "told": told["progress"]["values"].get("goodput"),
            "incidents": [one for one in told["incidents"] if one["kind"] == "restart"],
        }


def _measure(args: argparse.Namespace, flags: Sequence[str]) -> str:
    found: dict[str, Any] = {}
    lines = []
    with tempfile.TemporaryDirectory(prefix="goodput-text-") as name:
        data = build_real_text(Path(name))
        for side in args.only:
            found[side] = one = measure(side, data, args, flags=flags)
            target = f"; target {TARGET:g}" if side == SIDES[0] else ""
            lines.append(
                f"{side}: goodput {one['goodput']:.3f}{target}; {one['steps']} steps kept, "
                f"{counted(len(one['kills']), 'rank')} killed in {one['wall_seconds'] / 60:.1f} min"
            )
            print(lines[-1], flush=True)
            record = {**about("goodput.py", args.typed), "sides": found}
            args.json.write_text(json.dumps(record, indent=1) + "\n")
    return f"written: {args.json}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument(
        "--minutes", type=number(above=0), default=30.0, help="minutes that each side trains"
    )
    parser.add_argument(
        "--every",
        type=number(above=0),
        default=120.0,
        metavar="SECONDS",
        help="seconds between faults",
    )
    parser.add_argument("--seed", type=integer(0), default=1, help="random seed of the faults")
    parser.add_argument(
        "--save-interval",
        type=integer(1),
        default=500,
        help="steps between checkpoints on disk; the state in memory is kept every 10 steps",
    )
    parser.add_argument(
        "--only", nargs="+", choices=SIDES, default=SIDES, metavar="SIDE", help=", ".join(SIDES)
    )
    parser.add_argument(
        "--replicas",
        type=integer(1),
        default=1,
        help="data-parallel ranks of each stage",
    )
    args, flags = parser.parse_with_run_flags(argv)
    args.typed = list(sys.argv[1:] if argv is None else argv)
    tool_command_line.require_results_file(args.json, "--json")
    return tool_command_line.run(
        lambda: _measure(args, flags), interrupted=f"the run under way is not in {args.json}"
    )


if __name__ == "__main__":
    sys.exit(main())
