"""Tell where the time of traced steps went, and where prediction and measurement differ most.

    hetero trace runs/trace
    hetero trace runs/trace --prediction runs/plan

The folder is that of a run with --hetero-trace. Its trace.json.gz opens in https://ui.perfetto.dev;
trace_predicted.json.gz, which this writes beside it, has the predicted pipeline below the ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero import cli

    sys.exit(cli.main(["trace", *sys.argv[1:]]))

from hetero.errors import Faults
from hetero.observe.trace import write_trace
from hetero.text import spans
from hetero.tools.tool_command_line import Parser, require_results_file, run
from hetero.tools.tracing.breakdown import (
    StageTime,
    between_steps,
    covered,
    critical,
    stage_times,
    table,
)
from hetero.tools.tracing.predicted import (
    Difference,
    differences,
    edge_latencies,
    planners_prediction,
    simulated_prediction,
    with_prediction,
)
from hetero.tools.tracing.trace_file import TraceFile, path_of, read_trace

_PREDICTED = "trace_predicted.json.gz"
_SHOWN_DIFFERENCES = 6
_WORTH_SHOWING = 0.002
"""Of a step; smaller differences are not shown."""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("Tell where the time of traced steps went, beside a prediction of them.")
    parser.add_argument("trace", help="folder of --hetero-trace, or the file in it")
    parser.add_argument(
        "--prediction",
        metavar="FOLDER",
        help="what `hetero plan --out` has written for this plan, or the trace.json in it; left "
        "out: the planner's simulator with the mean times of this trace",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=f"the trace with the prediction below it; default: {_PREDICTED} beside the trace",
    )
    return parser


def analyse(args: argparse.Namespace) -> str:
    """Read, compare and write; returns what to print. Raises UserError."""
    faults = Faults()
    path = path_of(Path(args.trace))
    trace = faults.read(lambda: read_trace(path))
    out = Path(args.out) if args.out else path.with_name(_PREDICTED)
    if args.out or trace is not None:
        faults.read(lambda: require_results_file(out))
    faults.refuse()
    assert trace is not None
    times = stage_times(trace)
    prediction = (
        simulated_prediction(trace, times)
        if args.prediction is None
        else planners_prediction(Path(args.prediction), trace)
    )
    write_trace(with_prediction(trace, prediction), out)
    step = max(time.step for time in times)
    shown = [
        each
        for each in differences(trace, times, prediction)
        if abs(each.seconds) > _WORTH_SHOWING * step
    ]
    lines = [
        *_heading(trace),
        *_aligned(table(times)),
        *_about_stages(trace, times),
        "",
        f"prediction: {prediction.source}",
        f"  step: predicted {_ms(prediction.seconds)}, measured {_ms(step)} "
        f"({step / prediction.seconds - 1:+.1%})",
        *(f"  {_difference(each)}" for each in shown[:_SHOWN_DIFFERENCES]),
    ]
    if shown:
        lines.append(f"they differ most in {shown[0].part} of {shown[0].stage.name}")
    return "\n".join([*lines, f"wrote {out}"])


def _heading(trace: TraceFile) -> list[str]:
    played = "; vendors are simulated" if trace.about["simulated"] else ""
    error = max(rank.clock_error for rank in trace.ranks)
    least, most = (
        pick(covered(rank, step) for rank in trace.ranks for step in trace.iterations)
        for pick in (min, max)
    )
    ways = f"{least:.1%}" if f"{least:.1%}" == f"{most:.1%}" else f"{least:.1%} to {most:.1%}"
    return [
        f"where the time of a step went (ms), {spans(trace.iterations, 'iteration')}, the mean of "
        f"each stage's ranks{played}",
        f"spans are {ways} of the measured steps; clocks of ranks agree to within "
        f"{error * 1e6:.0f} us",
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _about_stages(trace: TraceFile, times: Sequence[StageTime]) -> list[str]:
    slowest = critical(times)
    lines = [
        f"{slowest.name} is critical: it waits least, {slowest.waiting / slowest.step:.0%} of the "
        f"step, and computes {slowest.compute / slowest.step:.0%}"
    ]
    latencies = edge_latencies(trace.ranks, trace.arrivals)
    for (source, target), seconds in sorted(latencies.items()):
        lines.append(
            f"rank {source} to rank {target}: {_ms(sum(seconds) / len(seconds))} a message, over "
            f"the {len(seconds)} that rank {target} was waiting for"
        )
    lines += [
        f"between the steps: {phase} {_ms(seconds)}"
        for phase, seconds in between_steps(trace).items()
        if seconds >= 1e-4  # nothing was saved
    ]
    return lines


def _difference(each: Difference) -> str:
    return (
        f"{each.part} of {each.stage.name}: predicted {_ms(each.predicted)}, measured "
        f"{_ms(each.measured)} ({each.seconds * 1e3:+.2f} ms)"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run(lambda: analyse(args))
