"""What --timing-log-level costs a step: runs with and without timers, in alternation.

    python docs/benchmarks/time_timers.py OUT [--preset examples/presets/llama3.2_1b.yaml] \
        [--levels 0 2] [--repeats 3] [--iterations 30] [--warmup 10] [--log-interval 10] \
        [--nproc 2] [--transport auto | homogeneous] [-- more flags]

A repeat is one run of each level, every second one in reverse order, so that a drift falls on both
alike. The time of a step is that from the end of the iteration before the window to the end of its
last, divided by their number: logging and all between two iterations are in it. A cost is the ratio
of two runs of one repeat; how far the repeats are apart tells how much of it is noise.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hetero.text import integer, number
from hetero.tools import tool_command_line
from hetero.tools.runs import SIMULATED, Launch, homogeneous_flags, mixed_flags, run_to_end

TRAINING = (
    "--lr 1e-4 --min-lr 1e-5 --lr-decay-style constant --clip-grad 1.0 --eval-iters 0"
    " --use-distributed-optimizer --mock-data --tokenizer-type NullTokenizer --vocab-size 32000"
    " --seq-length 4096 --micro-batch-size 1 --global-batch-size 32"
)


@dataclass(frozen=True)
class Run:
    """One run of one level."""

    level: int
    step_ms: float
    losses: list[float]


@dataclass(frozen=True)
class Cost:
    """Of a level, beside the first level of the same repeat; 0.003 is 0.3 % of a step."""

    level: int
    median: float
    least: float
    most: float


def step_milliseconds(ends: Mapping[int, float], *, warmup: int) -> float:
    """Of one iteration after the warm-up, from the clock (s) at the end of every iteration."""
    last = max(ends)
    return (ends[last] - ends[warmup]) * 1e3 / (last - warmup)


def costs(repeats: Sequence[Sequence[Run]], *, base: int) -> list[Cost]:
    """What each level but `base` costs."""
    found: dict[int, list[float]] = {}
    for runs in repeats:
        without = next(run.step_ms for run in runs if run.level == base)
        for run in runs:
            if run.level != base:
                found.setdefault(run.level, []).append(run.step_ms / without - 1)
    return [
        Cost(level=level, median=statistics.median(ratios), least=min(ratios), most=max(ratios))
        for level, ratios in found.items()
    ]


def ends_of_iterations(folder: Path) -> dict[int, float]:
    """The clock at which rank 0 wrote each iteration's points, in seconds."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {point.step: point.wall_time for point in events.Scalars("iteration-time")}


def run(level: int, options: argparse.Namespace, *, name: str) -> Run:
    points = options.out / f"{name}.tensorboard"
    shutil.rmtree(points, ignore_errors=True)
    flags = ["--yaml-cfg", str(options.preset), *TRAINING.split()]
    environ = {}
    if options.transport == "homogeneous":
        flags += homogeneous_flags(stages=options.nproc, layers=None)
    else:
        vendors, sizes = ("nvidia", "amd"), (options.nproc - options.nproc // 2, options.nproc // 2)
        flags += mixed_flags(vendors=vendors, sizes=sizes, layers=None, transport=options.transport)
        environ = SIMULATED
    flags += ["--train-iters", str(options.iterations), "--log-interval", str(options.log_interval)]
    flags += ["--tensorboard-dir", str(points), "--timing-log-level", str(level), *options.flags]
    finished = run_to_end(
        Launch(
            name=name,
            flags=tuple(flags),
            nproc=options.nproc,
            folder=options.out,
            environ=environ,
            deadline=options.deadline,
        )
    )
    step_ms = step_milliseconds(ends_of_iterations(points), warmup=options.warmup)
    print(f"{name}: {step_ms:.2f} ms a step", flush=True)
    return Run(level=level, step_ms=step_ms, losses=[row["loss"] for row in finished.iterations])


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("--preset", type=Path, default=Path("examples/presets/llama3.2_1b.yaml"))
    parser.add_argument("--levels", type=int, nargs="+", choices=(0, 1, 2), default=[0, 2])
    parser.add_argument("--repeats", type=integer(1), default=3)
    parser.add_argument("--iterations", type=integer(2), default=30)
    parser.add_argument("--warmup", type=integer(1), default=10)
    parser.add_argument("--log-interval", type=integer(1), default=10)
    parser.add_argument("--nproc", type=integer(2), default=2)
    parser.add_argument("--transport", default="auto", help="of a mixed run, or homogeneous")
    parser.add_argument(
        "--deadline", type=number(above=0), default=300.0, help="seconds for each run"
    )
    cut = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    options.flags = list(words[cut + 1 :])
    if len(set(options.levels)) < 2:
        parser.error("--levels must name two or more, the first being what the others are beside")
    if options.warmup >= options.iterations:
        parser.error("--warmup must be less than --iterations")
    if not options.preset.is_file():
        parser.error(f"--preset {options.preset} is no file; check the path")
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    return tool_command_line.run(lambda: measure(options))


def measure(options: argparse.Namespace) -> str:
    """Train, write timers.json and say what the levels cost. HeteroError where a run fails."""
    tool_command_line.make_results_folder(options.out, "OUT")
    repeats = []
    for repeat in range(options.repeats):
        order = options.levels if repeat % 2 == 0 else options.levels[::-1]
        repeats.append(
            [run(level, options, name=f"repeat{repeat}-level{level}") for level in order]
        )
    found = costs(repeats, base=options.levels[0])
    # On GPUs kernels may add in another order from run to run, so this says something only where
    # --deterministic-mode is among the flags, or on CPU.
    equal = len({tuple(run.losses) for runs in repeats for run in runs}) == 1
    lines = [
        f"level {cost.level} beside level {options.levels[0]}: {cost.median:+.3%} of a step "
        f"({cost.least:+.3%} to {cost.most:+.3%} in {options.repeats} repeats)"
        for cost in found
    ]
    lines.append(f"losses {'equal in all runs, bit for bit' if equal else 'differ between runs'}")
    record = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "preset": options.preset.stem,
        "transport": options.transport,
        "simulated": options.transport != "homogeneous",
        "flags": options.flags,
        "iterations": options.iterations,
        "warmup": options.warmup,
        "log_interval": options.log_interval,
        "step_ms": [{run.level: run.step_ms for run in runs} for runs in repeats],
        "losses_equal": equal,
        "costs": [asdict(cost) for cost in found],
    }
    (options.out / "timers.json").write_text(json.dumps(record, indent=1))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
