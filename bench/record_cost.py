"""Measure what each rank's record, which is always on, costs a training run.

    python bench/record_cost.py --json record_cost.json [--ranks 2] [--pairs 24] [--steps 20]

One run of the preset `tiny` switches its record on and off by blocks of steps (on, off, off, on and
so on), so that whatever else the machine does meets both. Neighbours make a pair; its cost is the
CPU time of a step with the record over that without. CPU time is that of the whole process, and of
its main thread: other work on the machine disturbs wall time much more, which is told beside it.

Because a pair scatters by more than the cost, that is also counted: how many times a step each part
of the record is called, times the median of what a call takes there, by the wall clock; and what a
snapshot takes, of which a heartbeat carries one a second.
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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

from hetero.errors import HeteroError
from hetero.observe.record import CallEntry, LinkState, RailState, Recorder
from hetero.text import integer
from hetero.tools import tool_command_line
from hetero.tools.runs import SIMULATED

ROOT = Path(__file__).resolve().parents[1]
ENTRY = Path(__file__).parent / "record/alternating.py"
TIMES = ("cpu_seconds", "main_thread_cpu_seconds", "wall_seconds")
MIXED = "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1".split()
_WARM_UP = 4
"""Blocks that are not counted."""
_SNAPSHOTS = 500


@dataclass(frozen=True)
class RankBlocks:
    """What one rank's script has written."""

    blocks: list[dict[str, Any]]
    parts: dict[str, dict[str, float]]
    """Of each function of the record: calls a step, and microseconds of a call."""


def run_script(
    entry: Path,
    flags: Sequence[str],
    *,
    preset: str | Path,
    ranks: int,
    environ: Mapping[str, str],
    timeout: float | None = None,
) -> list[dict[str, Any]]:
    """What each rank of one run has written of its blocks. Raises HeteroError if it fails.

    `timeout` in seconds. `entry` runs in the place of pretrain_gpt.py, with BLOCKS_FOLDER set.
    """
    command = [sys.executable, "-m", "hetero.run", "--nproc-per-node", str(ranks), str(entry)]
    # Later flags go before those of the preset.
    command += [
        "--yaml-cfg",
        str(preset),
        "--eval-iters",
        "0",
        "--log-interval",
        "1000000",
        *(MIXED if ranks == 2 else []),
    ]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, *flags],
            cwd=ROOT,
            env={
                **os.environ,
                **(SIMULATED if ranks == 2 else {}),
                "OMP_NUM_THREADS": "1",
                "BLOCKS_FOLDER": folder,
                **environ,
            },
            text=True,
            capture_output=True,
            check=False,
            timeout=timeout,
        )
        if done.returncode:
            raise HeteroError(f"the run failed: {done.stderr[-2000:]}")
        files = [Path(folder) / f"blocks_{rank}.json" for rank in range(ranks)]
        return [json.loads(file.read_text()) for file in files]


def run_blocks(*, ranks: int, pairs: int, steps: int) -> list[RankBlocks]:
    """The blocks of each rank of one run. Raises HeteroError if it fails."""
    iterations = (2 * pairs + _WARM_UP) * steps + 1
    written = run_script(
        ENTRY,
        ["--train-iters", str(iterations)],
        preset="hetero/presets/tiny.yaml",
        ranks=ranks,
        environ={"BLOCK_STEPS": str(steps)},
    )
    return [RankBlocks(one["blocks"][_WARM_UP:], one["parts"]) for one in written]


def ratios(blocks: Sequence[dict[str, Any]], time_of: str) -> list[float]:
    """Of each pair of neighbours: the time with the record over that without, less 1."""
    found = []
    for one, other in zip(blocks[::2], blocks[1::2], strict=False):
        on, off = (one, other) if one["is_on"] else (other, one)
        found.append(on[time_of] / off[time_of] - 1.0)
    return found


def summary(values: Sequence[float]) -> dict[str, Any]:
    """The median with its standard error, and quartiles, in per cent."""
    low, middle, high = statistics.quantiles(values, n=4)
    # Of a median, from the spread of the quartiles as a normal distribution has it.
    error = 1.2533 * (high - low) / 1.349 / len(values) ** 0.5
    percent = {"median": middle, "error": error, "lower_quartile": low, "upper_quartile": high}
    return {name: round(100.0 * value, 3) for name, value in percent.items()}


class Carried:
    """A link of two rails, as the recorder sees it."""

    def __init__(self, peer: int) -> None:
        rails = tuple(RailState(name=f"eth{n}", bytes_sent=1 << 40) for n in range(2))
        self._state = LinkState(peer=peer, transport="tcp", bytes_sent=1 << 40, rails=rails)

    def state(self) -> LinkState:
        return self._state


def snapshot_microseconds() -> float:
    """CPU time of a snapshot and its JSON, with two links and 2,000 calls."""
    recorder = Recorder()
    links = [Carried(1), Carried(2)]
    for link in links:
        recorder.add_link(link)
    for sequence in range(2000):
        recorder.add_call(CallEntry("a group", sequence, "all_reduce", completed=1))
    best = float("inf")
    for _ in range(5):
        begun = time.thread_time()
        for _ in range(_SNAPSHOTS):
            recorder.snapshot().to_json()
        best = min(best, (time.thread_time() - begun) / _SNAPSHOTS)
    return round(1e6 * best, 1)


def counted(rank: RankBlocks, *, snapshot: float, seconds_a_step: float) -> dict[str, float]:
    """What the calls of a step, and the snapshot of a second, take on one rank."""
    step = sum(
        part["calls_a_step"] * part["microseconds_of_a_call"] for part in rank.parts.values()
    )
    share = step * 1e-6 / seconds_a_step + snapshot * 1e-6
    return {"microseconds_a_step": round(step, 1), "per_cent_of_a_step": round(100.0 * share, 4)}


def measure(args: argparse.Namespace) -> str:
    ranks = run_blocks(ranks=args.ranks, pairs=args.pairs, steps=args.steps)
    snapshot = snapshot_microseconds()
    found = []
    lines = []
    for number, rank in enumerate(ranks):
        off = [block for block in rank.blocks if not block["is_on"]]
        seconds = {
            name: statistics.median(block[name] for block in off) / args.steps for name in TIMES
        }
        entry: dict[str, Any] = {
            "rank": number,
            "seconds_a_step": {name: round(value, 6) for name, value in seconds.items()},
            "pairs": {name: summary(ratios(rank.blocks, name)) for name in TIMES},
            # Of the shortest of the three: wall time has what else the machine does in it.
            "counted": counted(rank, snapshot=snapshot, seconds_a_step=min(seconds.values())),
            "parts": rank.parts,
            "blocks": rank.blocks,
        }
        found.append(entry)
        paired = entry["pairs"]["cpu_seconds"]
        lines.append(
            f"rank {number}: {paired['median']:+.2f} % of CPU time (median of {args.pairs} pairs, "
            f"standard error {paired['error']:.2f}); counted {entry['counted']}"
        )
    record = {
        "command": f"python bench/record_cost.py --ranks {args.ranks} --pairs {args.pairs} "
        f"--steps {args.steps}",
        "hardware": f"{os.cpu_count()}-core {platform.machine()} CPU",
        "load_at_the_end": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "simulated": args.ranks == 2,
        "microseconds_of_a_snapshot": snapshot,
        "ranks": found,
    }
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    return "\n".join([*lines, f"written: {args.json}"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument(
        "--ranks", type=int, choices=(1, 2), default=2, help="one, or two of simulated vendors"
    )
    parser.add_argument("--pairs", type=integer(8), default=24, help="pairs of blocks")
    parser.add_argument("--steps", type=integer(1), default=20, help="steps of a block")
    args = parser.parse_args(argv)
    tool_command_line.require_results_file(args.json, "--json")
    return tool_command_line.run(lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
