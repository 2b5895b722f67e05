"""Measure tokens/s over the split of the layers, with one simulated vendor slowed by factors.

    python bench/bench_splits.py --out runs/splits
    python bench/bench_splits.py --model examples/presets/llama3.2_1b.yaml --seq-length 2048 \\
        --micro-batch-size 1 --global-batch-size 16 --out runs/splits -- --num-layers 32

Every point is a run of pretrain_gpt.py, and so is each vendor alone on as many GPUs: where a mixed
run is below the slower of them, its split is a bad one. One machine plays both vendors (simulated)
and HETERO_SLOWDOWN slows the second. --predict draws the planner's curves too, from a profile of
one device. The folder holds splits.json, splits.md and splits.png, written anew after every run;
--resume goes on from them. What follows `--` goes to all runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

import torch

from bench.reproduction import split_sweep
from bench.reproduction.measurement import Attempt
from bench.reproduction.run_options import (
    add_run_flags,
    fastest_transport,
    parse_words,
    parsed,
    require_gpus,
    without_false_comparison,
)
from bench.reproduction.settings import VENDORS
from bench.reproduction.split_prediction import predictions
from bench.reproduction.split_sweep import SweepOptions, planned_runs
from bench.reproduction.training_runs import device_of, record_of, run_all
from hetero.errors import UserError
from hetero.link import TRANSPORTS
from hetero.text import integer, number
from hetero.tools import tool_command_line
from hetero.tools.reports.page import write_whole

SHARES = (10, 12, 14, 16, 18, 20, 22)
"""Of 32 layers, those on the first stage."""


def parse_options(argv: Sequence[str]) -> SweepOptions:
    """Read the command line. Raises UserError, or exits with 2 and one sentence."""
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--nproc",
        type=integer(1),
        default=2,
        help="GPUs (processes, on CPU): two stages",
    )
    parser.add_argument(
        "--first-layers",
        type=int,
        nargs="+",
        metavar="LAYERS",
        help="layers of the first stage, a number for each split (default: "
        f"{', '.join(map(str, SHARES))} of each 32)",
    )
    parser.add_argument(
        "--factors",
        type=number(above=0),
        nargs="+",
        default=[1.0, 1.5, 2.0],
        metavar="FACTOR",
        help=f"how many times as long each layer of {VENDORS[1]} takes",
    )
    parser.add_argument(
        "--transport", choices=TRANSPORTS, default=fastest_transport(), help="between the stages"
    )
    parser.add_argument(
        "--predict",
        action="store_true",
        help="profile a device and draw what the planner predicts of every split",
    )
    add_run_flags(parser, iterations=5, warmup=2)
    given, shared = parse_words(parser, argv)
    if min(given.factors) < 1:
        raise UserError("--factors must be 1.0 or more; one vendor is slowed, none is sped up")
    require_gpus(given.nproc, flag=f"--nproc {given.nproc}")
    options = SweepOptions(
        **shared,
        nproc=given.nproc,
        splits=(),
        factors=tuple(sorted(set(given.factors))),
        transport=given.transport,
        predict=given.predict,
    )
    args = parsed(options, planned_runs(options)[0].flags, nproc=given.nproc)
    if options.predict and args.padded_vocab_size is None:
        raise UserError(
            f"--predict needs the rows of the embedding, which {options.setting.name} leaves to "
            "the tokenizer; add -- --padded-vocab-size ROWS, a flag of pretrain_gpt.py"
        )
    total = args.num_layers
    first = given.first_layers or [round(total * share / 32) for share in SHARES]
    if not all(0 < count < total for count in first):
        raise UserError(
            f"--first-layers {' '.join(map(str, first))}: each stage holds one layer or more of "
            f"the model's {total}; change them"
        )
    splits = tuple((count, total - count) for count in sorted(set(first)))
    options = replace(options, splits=splits)
    for run in planned_runs(options):
        parsed(options, run.flags, nproc=run.nproc)
    return without_false_comparison(options)


def write_results(
    options: SweepOptions,
    attempts: Sequence[Attempt],
    *,
    predicted: Mapping[str, float],
    command: Sequence[str],
) -> str:
    """Write the three files anew. Returns the text of splits.md."""
    runs = planned_runs(options)
    found = split_sweep.curves(options, attempts, predicted)
    lines = split_sweep.notes(options, found, attempts)
    args = parsed(options, runs[0].flags, nproc=options.nproc)
    title = (
        f"{options.setting.name} on {options.nproc} x {device_of(attempts)} of one machine, "
        f"sequence {args.seq_length}, micro-batch {args.micro_batch_size}, "
        f"global batch {args.global_batch_size}, vendors simulated"
    )
    record = {
        **record_of(options, runs, attempts, command),
        "summary": title,
        "notes": lines,
        "curves": [curve.as_json() for curve in found],
    }
    table = split_sweep.render(options, found)
    text = f"{title}\n\n{table}\n\n" + "".join(f"- {line}\n" for line in lines)
    write_whole(options.out / "splits.json", json.dumps(record, indent=1) + "\n")
    write_whole(options.out / "splits.md", text)
    (options.out / "splits.png").write_bytes(split_sweep.draw(found, title=title))
    if torch.cuda.is_available():
        split_sweep.require_slowed(options, attempts)
    return text


def sweep(argv: Sequence[str]) -> str:
    """Make all runs. Returns the line for the end."""
    options = parse_options(argv)
    command = ("bench/bench_splits.py", *argv)
    predicted: Mapping[str, float] = {}
    if options.predict:
        every = planned_runs(replace(options, splits=split_sweep.all_splits(options)))
        predicted = predictions(options, every, nproc=options.nproc)
    run_all(
        options,
        planned_runs(options),
        results=options.out / "splits.json",
        write=lambda attempts: write_results(
            options, attempts, predicted=predicted, command=command
        ),
    )
    return f"written: splits.json, splits.md and splits.png in {options.out}"


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return tool_command_line.run(lambda: sweep(words))


if __name__ == "__main__":
    sys.exit(main())
