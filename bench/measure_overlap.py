"""Measure how much of a slow link hides behind computing, in a pipeline of two stages.

    python bench/measure_overlap.py --model llama3_8b --out runs/overlap
    python bench/measure_overlap.py --model examples/presets/tiny.yaml --gigabytes-per-s 0.02 0.1 \\
        --out runs/overlap -- --hidden-size 256 --seq-length 512 --max-position-embeddings 512

Two runs on two GPUs of this machine, or on its CPU: one over the vendor's library, and one over
our link, slowed to each bandwidth in turn, once with every receive posted when it is asked for and
once with the next one posted early. Beside the step times stand those that no overlap and a perfect
one predict from the passes of the first run. What follows `--` goes to both runs. One machine plays
both vendors, which the results call simulated. The folder holds overlap.json and overlap.md.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

import torch

from bench.overlap.phases import MEASURED, Phase, as_variable
from bench.overlap.predicted_steps import Passes, PredictedSteps, predict
from bench.real_text.data_set import build_real_text
from bench.reproduction.run_options import (
    all_flags,
    fastest_transport,
    require_gpus,
    require_memory,
)
from bench.reproduction.settings import HOMOGENEOUS, LLAMA3_8B, model_setting
from bench.reproduction.table_rows import Options, parsed_row, planned_run
from hetero.errors import UserError
from hetero.text import integer, number
from hetero.tools import tool_command_line
from hetero.tools.reports.page import write_whole
from hetero.tools.reports.text_table import markdown
from hetero.tools.runs import SIMULATED, Finished, Launch, run_to_end

WARM_UP = 3
"""Iterations of each run that are left away."""
SHARED = ("--timing-log-level", "2", "--log-interval", "1", "--lr-decay-iters", "1000")
"""The learning rate too: the runs are of different lengths, and their losses are compared."""


@dataclass(frozen=True)
class Row:
    """One bandwidth. Seconds are of a step, the median over its iterations."""

    asked: float | None
    """Bytes a second; None for the link as it is."""
    measured: float | None
    """What the wires carried, in bytes a second of the time they were busy."""
    when_asked: float
    """Each receive posted when it is asked for."""
    early: float
    predicted: PredictedSteps | None


def phases_of(bandwidths: Sequence[float], iterations: int) -> list[Phase]:
    """The warm-up; then every speed twice. The link as it is comes first."""
    speeds = [None, *(speed * 1e9 for speed in bandwidths)]
    measured = [Phase(speed, early, iterations) for speed in speeds for early in (False, True)]
    return [Phase(None, True, WARM_UP), *measured]


def run_rows(options: Options, bandwidths: Sequence[float], data: Sequence[str]) -> dict[str, Any]:
    """Both runs, and what they come to."""
    phases = phases_of(bandwidths, options.iterations)
    every = sum(phase.iterations for phase in phases)
    # For the same samples and learning rates both are as long, and the first stops early.
    stop = ["--exit-interval", str(WARM_UP + options.iterations)]
    homogeneous = _run(options, HOMOGENEOUS, [*data, *stop], iterations=every)
    slowed = _run(options, options.rows[0], data, iterations=every, phases=phases)
    args = parsed_row(options, HOMOGENEOUS)
    micro_batches = args.global_batch_size // args.micro_batch_size
    steady = homogeneous.iterations[WARM_UP:]
    step = median(record["elapsed_ms"] for record in steady) / 1000
    middle = min(steady, key=lambda record: abs(record["elapsed_ms"] / 1000 - step))
    passes = Passes.of(middle["timing"]["stages"], micro_batches=micro_batches, step=step)
    tensor = slowed.report["boundary_bytes"] // (2 * micro_batches * every)
    rows = rows_of(slowed.iterations, phases, _wires(options.out), passes=passes, tensor=tensor)
    return {
        "model": options.setting.name,
        "device": slowed.report["ranks"][0]["device"],
        "transport": slowed.report["transport"],
        "torch": str(torch.__version__),
        "simulated": slowed.report["simulated"],
        "sequence": args.seq_length,
        "global_batch": args.global_batch_size,
        "tensor_bytes": tensor,
        "loss_difference": _largest_difference(steady, slowed.iterations[WARM_UP:]),
        "homogeneous": asdict(passes),
        "rows": [asdict(row) for row in rows],
    }


def _largest_difference(
    records: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]
) -> float:
    """Of the losses, relative to the first ones."""
    return max(abs(b["loss"] / a["loss"] - 1) for a, b in zip(records, others, strict=False))


def rows_of(
    records: Sequence[dict[str, Any]],
    phases: Sequence[Phase],
    wires: dict[float, float],
    *,
    passes: Passes,
    tensor: int,
) -> list[Row]:
    """From the iterations of a run, one phase after the other. `tensor` is in bytes."""
    steps: dict[float | None, dict[bool, float]] = {}
    taken = 0
    for index, phase in enumerate(phases):
        part = records[taken : taken + phase.iterations]
        taken += phase.iterations
        if index:
            found = median(record["elapsed_ms"] for record in part) / 1000
            steps.setdefault(phase.bytes_per_s, {})[phase.receives_early] = found
    rows = []
    for speed, found_ in steps.items():
        measured = wires.get(speed) if speed is not None else None
        predicted = predict(passes, crossing=tensor / measured) if measured else None
        rows.append(Row(speed, measured, found_[False], found_[True], predicted))
    return rows


def _wires(folder: Path) -> dict[float, float]:
    """Bytes a second by the speed that was asked for, over all ranks' wires."""
    totals: dict[float, tuple[float, float]] = {}
    for file in folder.glob("wires.[0-9]*"):
        for wire in json.loads(file.read_text()):
            for speed, (nbytes, seconds) in wire:
                before = totals.get(speed, (0.0, 0.0))
                totals[speed] = before[0] + nbytes, before[1] + seconds
    return {speed: nbytes / seconds for speed, (nbytes, seconds) in totals.items() if seconds}


def _run(
    options: Options,
    row: str,
    data: Sequence[str],
    *,
    iterations: int,
    phases: Sequence[Phase] = (),
) -> Finished:
    flags = all_flags(options, planned_run(options, row).flags, data=data)
    flags += [*SHARED, "--train-iters", str(iterations)]
    cores = len(os.sched_getaffinity(0))
    environ = {"OMP_NUM_THREADS": str(max(1, cores // options.nproc))} | dict(os.environ)
    launch = Launch(
        name=row,
        flags=tuple(flags),
        nproc=options.nproc,
        folder=options.out,
        environ=environ,
        deadline=options.deadline,
    )
    if not phases:
        return run_to_end(launch)
    environ |= SIMULATED | as_variable(phases) | {MEASURED: str(options.out / "wires")}
    return run_to_end(
        Launch(
            **{field: getattr(launch, field) for field in ("name", "flags", "nproc", "folder")},
            environ=environ,
            entry=(str(Path(__file__).resolve().parent / "overlap" / "slowed_rank.py"),),
            deadline=options.deadline,
        )
    )


HEADINGS = (
    *("link, GB/s", "measured, GB/s", "a tensor crosses in, ms"),
    *("step: receive when asked, ms", "posted early, ms", "of homogeneous"),
    *("predicted: no overlap, ms", "1F1B's best, ms", "all hidden, ms"),
)


def as_table(record: dict[str, Any]) -> str:
    homogeneous = record["homogeneous"]["step"]
    difference = record["loss_difference"]
    title = (
        f"{record['model']} in two stages on {record['device']}, sequence {record['sequence']}, "
        f"global batch {record['global_batch']}, tensors of {record['tensor_bytes'] / 2**20:g} MiB "
        f"over {record['transport']}{', vendors simulated' if record['simulated'] else ''}; "
        f"homogeneous {homogeneous * 1000:,.1f} ms a step; its losses are the same"
        f"{f' within {difference:.1e}' if difference else ''}"
    )
    rows = []
    for row in record["rows"]:
        predicted = row["predicted"] or {}
        wire = [row["asked"], row["measured"]]
        cells = [f"{value / 1e9:.3g}" if value else "-" for value in wire]
        seconds = [
            record["tensor_bytes"] / row["measured"] if row["measured"] else None,
            *(row["when_asked"], row["early"]),
            *(predicted.get(name) for name in ("nothing", "overlapped", "hidden")),
        ]
        cells += [f"{value * 1000:,.1f}" if value is not None else "-" for value in seconds]
        cells.insert(5, f"{homogeneous / row['early']:.1%}")
        rows.append(cells)
    return f"{title}\n\n{markdown(HEADINGS, rows)}\n"


def parse_options(argv: Sequence[str] | None) -> tuple[Options, list[float]]:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=LLAMA3_8B.name, help="as of reproduce_table.py")
    parser.add_argument(
        "--gigabytes-per-s",
        type=number(above=0),
        nargs="+",
        default=[1.0, 5.0, 10.0, 25.0],
        metavar="N",
        help="bandwidths of the link, each direction",
    )
    parser.add_argument(
        "--iterations",
        type=integer(1),
        default=3,
        help="iterations at each bandwidth, and of the homogeneous run",
    )
    parser.add_argument(
        "--layers",
        type=integer(1),
        nargs=2,
        help="of each stage; left out: the model's",
    )
    for flag in ("--seq-length", "--micro-batch-size", "--global-batch-size"):
        parser.add_argument(flag, type=integer(1), help="left out: the model's")
    parser.add_argument("--transport", default=fastest_transport(), help="as --hetero-transport")
    parser.add_argument(
        "--deadline",
        type=number(above=0),
        default=300.0,
        help="seconds for one run, start-up included",
    )
    parser.add_argument("--out", required=True, help="folder for the results")
    given, extra = parser.parse_with_run_flags(argv)
    setting = model_setting(given.model)
    options = Options(
        setting=setting,
        nproc=2,
        rows=(given.transport,),
        rounds=1,
        iterations=given.iterations,
        warmup=WARM_UP,
        layers=tuple(given.layers) if given.layers else setting.layers,
        seq_length=given.seq_length or setting.seq_length,
        micro_batch_size=given.micro_batch_size or setting.micro_batch_size,
        global_batch_size=given.global_batch_size or setting.global_batch_size,
        data_path=(),
        deadline=given.deadline,
        resume=False,
        out=Path(given.out).absolute(),
        extra=tuple(extra),
    )
    for row in (HOMOGENEOUS, given.transport):
        parsed_row(options, row)
    require_gpus(options.nproc, flag="a pipeline of two stages")
    require_memory(setting, options.extra)
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise UserError(
            "with CUDA_DEVICE_MAX_CONNECTIONS=1 a slow link would hold up what computes; unset it"
        )
    return options, given.gigabytes_per_s


def measure(argv: Sequence[str] | None) -> str:
    options, bandwidths = parse_options(argv)
    tool_command_line.make_results_folder(str(options.out))
    for stale in options.out.glob("wires.[0-9]*"):
        stale.unlink()
    with tempfile.TemporaryDirectory(dir=options.out, prefix="data-") as folder:
        data = build_real_text(Path(folder)).flags
        record = run_rows(options, bandwidths, data)
    write_whole(options.out / "overlap.json", json.dumps(record, indent=1) + "\n")
    write_whole(options.out / "overlap.md", as_table(record))
    return f"{as_table(record)}\nwritten: overlap.json and overlap.md in {options.out}"


def main(argv: Sequence[str] | None = None) -> int:
    return tool_command_line.run(lambda: measure(argv))


if __name__ == "__main__":
    sys.exit(main())
