"""What saving checkpoints costs a training run: not at all, waiting, and with --async-save.

    python docs/benchmarks/async_save.py OUT [--preset examples/presets/llama3.2_1b.yaml] \
        [--iterations 24] [--interval 8] [--nproc 2] [-- more flags]

Three runs with the same flags. Cost: the time of all iterations after the first save has begun and
before the last one, over the same iterations of the run that saves nothing; and the time for which
training stood still at each save.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tools.runs import SIMULATED, Finished, Launch, mixed_flags, run_to_end

TRAINING = (
    "--lr 1e-4 --min-lr 1e-5 --lr-decay-style constant --clip-grad 1.0 --eval-iters 0"
    " --use-distributed-optimizer --log-interval 1 --mock-data --tokenizer-type NullTokenizer"
    " --vocab-size 32000"
)
KINDS = {"none": (), "waiting": ("--save", "FOLDER"), "async": ("--save", "FOLDER", "--async-save")}


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


def cost(finished: Finished, *, options: argparse.Namespace) -> dict[str, Any]:
    """Of the iterations between the first save and the last, which the run's end waits for."""
    window = [
        row["elapsed_ms"] / 1e3
        for row in finished.iterations
        if options.interval < row["iteration"] <= options.iterations - options.interval
    ]
    return {
        "seconds_in_iterations": sum(window),
        "median_iteration_s": statistics.median(window),
        "slowest_iteration_s": max(window),
        "stood_still_s": max(rank["saving_seconds"] for rank in finished.report["ranks"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--preset", type=Path, default=Path("examples/presets/llama3.2_1b.yaml"))
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--interval", type=int, default=8)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--deadline", type=float, default=300.0)
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    options.flags = words[cut + 1 :]
    if options.iterations < 3 * options.interval:
        parser.error("--iterations must be at least three times --interval")
    options.out.mkdir(parents=True, exist_ok=True)
    costs = {kind: cost(run(kind, options), options=options) for kind in KINDS}
    bare = costs["none"]["seconds_in_iterations"]
    saves = options.iterations // options.interval
    print(f"{'saving':<10}{'iterations s':>13}{'slower by':>11}{'stood still a save s':>22}")
    for kind, found in costs.items():
        found["slower_by"] = found["seconds_in_iterations"] / bare - 1
        found["stood_still_a_save_s"] = found["stood_still_s"] / saves
        print(
            f"{kind:<10}{found['seconds_in_iterations']:>13.2f}{found['slower_by']:>10.2%} "
            f"{found['stood_still_a_save_s']:>21.3f}"
        )
    record = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "flags": options.flags,
        "preset": options.preset.stem,
        "iterations": options.iterations,
        "interval": options.interval,
        "simulated": True,
        "costs": costs,
    }
    (options.out / "async_save.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
