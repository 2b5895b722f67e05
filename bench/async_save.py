"""What saving checkpoints costs a training run: not at all, waiting, and with --async-save.

    python bench/async_save.py OUT [--preset examples/presets/llama3.2_1b.yaml] \
        [--iterations 24] [--interval 8] [--nproc 2] [--kinds none async] [-- more flags]

One run of each kind with the same flags. A save costs the time for which training stood still, on
the rank where it stood longest, and the time by which the iterations up to the next save are longer
than those of the run that saves nothing. In per cent that is over the time between two saves, so a
cost means nothing without that time: at twice the interval it is half. The first save may cost more
than the later ones, once; it is told apart.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

import torch

from hetero import text
from hetero.tools import tool_command_line
from hetero.tools.runs import SIMULATED, Finished, Launch, mixed_flags, run_to_end

TRAINING = (
    "--lr 1e-4 --min-lr 1e-5 --lr-decay-style constant --clip-grad 1.0 --eval-iters 0"
    " --use-distributed-optimizer --log-interval 1 --mock-data --tokenizer-type NullTokenizer"
    " --vocab-size 32000"
)
KINDS = {"none": (), "waiting": ("--save", "FOLDER"), "async": ("--save", "FOLDER", "--async-save")}


@dataclass(frozen=True)
class Cost:
    """Of the saves of one run; times in seconds."""

    iterations_s: float
    """All iterations from the first save to the last, which has none after it."""
    slower_a_save_s: float
    """What they are longer than without saves, for each save among them."""
    first_stood_still_s: float
    first_memory_wait_s: float
    """The share of the first save's that went into memory for a copy."""
    later_stood_still_s: float
    """The mean of all saves but the first."""
    later_cost: float
    """Of a save but the first, as a share of the time between two saves."""
    one_off_s: float
    """By how much longer training stood still at the first save than at the later ones."""
    before_first_slower_s: float
    """What the iterations before the first save are longer, the very first left out."""


def seconds_between(finished: Finished, *, after: int, until: int) -> float:
    """The time of the iterations `after` < iteration <= `until`."""
    return sum(
        row["elapsed_ms"] / 1e3 for row in finished.iterations if after < row["iteration"] <= until
    )


def longest_by_save(finished: Finished, key: str) -> list[float]:
    """A time of each save, of the rank where it was longest."""
    ranks = [[save[key] for save in rank["saves"]] for rank in finished.report["ranks"]]
    for rank in finished.report["ranks"]:
        for number, save in enumerate(rank["saves"], start=1):
            if save["written_s"] is None:
                sys.exit(f"the {number}. save of a run failed, so it measures nothing: see its log")
    return [max(times) for times in zip(*ranks, strict=True)]


def seconds_an_interval(bare: Finished, *, iterations: int, interval: int) -> float:
    """The time between two saves, as the run without saves needs it."""
    periods = iterations // interval - 1
    return seconds_between(bare, after=interval, until=(periods + 1) * interval) / periods


def cost_of(finished: Finished, bare: Finished, *, iterations: int, interval: int) -> Cost:
    """What the saves of `finished` cost beside `bare`, which made none."""
    periods = iterations // interval - 1
    window = {"after": interval, "until": (periods + 1) * interval}
    warm = {"after": 1, "until": interval}
    seconds = seconds_between(finished, **window)
    slower = (seconds - seconds_between(bare, **window)) / periods
    stood_still = longest_by_save(finished, "stood_still_s")
    later = statistics.mean(stood_still[1:])
    between = seconds_an_interval(bare, iterations=iterations, interval=interval)
    return Cost(
        iterations_s=seconds,
        slower_a_save_s=slower,
        first_stood_still_s=stood_still[0],
        first_memory_wait_s=longest_by_save(finished, "memory_wait_s")[0],
        later_stood_still_s=later,
        later_cost=(slower + later) / between,
        one_off_s=stood_still[0] - later,
        before_first_slower_s=seconds_between(finished, **warm) - seconds_between(bare, **warm),
    )


def run(kind: str, options: argparse.Namespace) -> Finished:
    folder = options.out / f"saved-{kind}"
    flags = ["--yaml-cfg", str(options.preset), *TRAINING.split()]
    flags += mixed_flags(
        vendors=("nvidia", "amd"), sizes=(1, 1), layers=None, transport=options.transport
    )
    flags += ["--train-iters", str(options.iterations), *options.flags]
    flags += [str(folder) if word == "FOLDER" else word for word in KINDS[kind]]
    if KINDS[kind]:
        flags += ["--save-interval", str(options.interval), "--keep-last", "1"]
    finished = run_to_end(
        Launch(
            name=kind,
            flags=tuple(flags),
            nproc=options.nproc,
            folder=options.out,
            environ=SIMULATED,
            deadline=options.deadline,
        )
    )
    shutil.rmtree(folder, ignore_errors=True)
    return finished


def table(costs: dict[str, Cost], *, between: float, interval: int) -> str:
    head = (
        f"a save every {between:.2f} s ({interval} iterations); seconds, of the rank that stood "
        "still longest\n"
        f"{'':<10}{'later saves, each':^36}{'first save':^32}{'before it':>11}\n"
        f"{'saving':<10}{'stood still':>12}{'slower':>10}{'cost':>10}    "
        f"{'stood still':>12}{'memory':>8}{'one-off':>9}{'slower':>14}"
    )
    rows = [
        f"{kind:<10}{cost.later_stood_still_s:>12.3f}{cost.slower_a_save_s:>10.3f}"
        f"{cost.later_cost:>10.2%}    {cost.first_stood_still_s:>12.3f}"
        f"{cost.first_memory_wait_s:>8.3f}{cost.one_off_s:>9.3f}{cost.before_first_slower_s:>14.3f}"
        for kind, cost in costs.items()
    ]
    return "\n".join([head, *rows])


def run_record(finished: Finished, cost: Cost | None) -> dict[str, Any]:
    return {
        "elapsed_ms": [row["elapsed_ms"] for row in finished.iterations],
        "ranks": [
            {"saving_seconds": rank["saving_seconds"], "saves": rank["saves"]}
            for rank in finished.report["ranks"]
        ],
        "cost": None if cost is None else asdict(cost),
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument(
        "--preset",
        type=Path,
        default=Path("examples/presets/llama3.2_1b.yaml"),
        metavar="FILE",
        help="YAML file of the model's flags",
    )
    parser.add_argument(
        "--iterations", type=text.integer(1), default=24, help="iterations of each run"
    )
    parser.add_argument(
        "--interval", type=text.integer(1), default=8, help="iterations between two saves"
    )
    parser.add_argument("--nproc", type=text.integer(2), default=2, help="number of ranks")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=list(KINDS),
        default=list(KINDS),
        help="how the runs save",
    )
    parser.add_argument("--transport", default="auto", help="transport of the link")
    parser.add_argument(
        "--deadline", type=text.number(above=0), default=300.0, help="seconds for each run"
    )
    options, flags = parser.parse_with_run_flags(argv)
    options.flags = flags
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"{options.out} is a file; name a folder for the results")
    if not options.preset.is_file():
        parser.error(f"--preset {options.preset} is no file; check the path")
    if options.interval < 2:
        parser.error("--interval must be at least 2: the first iteration is no measure")
    if options.iterations < 3 * options.interval:
        parser.error("--iterations must be at least three times --interval")
    if "none" not in options.kinds or len(set(options.kinds)) < 2:
        parser.error("--kinds must name none, which the others are compared with, and another")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    return tool_command_line.run(lambda: measure(options))


def measure(options: argparse.Namespace) -> str:
    """Train, write async_save.json and say what saves cost. HeteroError where a run fails."""
    tool_command_line.make_results_folder(options.out, "OUT")
    runs = {kind: run(kind, options) for kind in KINDS if kind in options.kinds}
    sizes = {"iterations": options.iterations, "interval": options.interval}
    costs = {
        kind: cost_of(finished, runs["none"], **sizes)
        for kind, finished in runs.items()
        if kind != "none"
    }
    between = seconds_an_interval(runs["none"], **sizes)
    record = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "flags": options.flags,
        "preset": options.preset.stem,
        "simulated": True,
        **sizes,
        "seconds_between_saves": between,
        "runs": {kind: run_record(finished, costs.get(kind)) for kind, finished in runs.items()},
    }
    (options.out / "async_save.json").write_text(json.dumps(record, indent=1))
    return table(costs, between=between, interval=options.interval)


if __name__ == "__main__":
    sys.exit(main())
