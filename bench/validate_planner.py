"""Predict runs that were measured, and say how far off that is.

    git clone https://github.com/eth-easl/sailor
    python bench/validate_planner.py --sailor sailor

predicts what Sailor published: its repository (MIT) holds measured steps of mixed GPUs and of GH200
beside the profiles that its own simulator starts from.

    python bench/validate_planner.py --own-runs runs/own --json own.json

profiles this machine, predicts plans for it and runs them with pretrain_gpt.py: on two CPU cores or
two GPUs, which play two vendors of which one is slowed (*simulated*). Nothing is fitted to a step
that is predicted; docs/benchmarks/planner.md says where each number comes from.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script(core=False, needs="numpy")

from bench.planner_validation.recorded_runs import Record, find_records
from bench.planner_validation.replayed_run import Replay
from bench.planner_validation.scores import Score, score
from hetero.text import number
from hetero.tools.reports.text_table import aligned
from hetero.tools.tool_command_line import Parser, run


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser((__doc__ or "").partition("\n")[0])
    of = parser.add_mutually_exclusive_group(required=True)
    of.add_argument("--sailor", type=Path, metavar="FOLDER", help="a checkout of Sailor")
    of.add_argument(
        "--own-runs",
        type=Path,
        metavar="FOLDER",
        help="where profiles and runs made here are kept; those that are there are not made again",
    )
    parser.add_argument(
        "--seconds",
        type=number(above=0),
        default=math.inf,
        help="of --own-runs: after these no further run is begun; ask again for the others",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    options = parser.parse_args(argv)
    if options.own_runs is not None:
        done = "what is done is kept; ask again for the rest"
        return run(lambda: _own_runs(options), interrupted=done)
    return run(lambda: _validate(options), interrupted="nothing was written")


def _own_runs(options: argparse.Namespace) -> str:
    from bench.planner_validation.own_report import own_runs

    return own_runs(options.own_runs, seconds=options.seconds, figures=options.json)


def _validate(options: argparse.Namespace) -> str:
    records = find_records(options.sailor)
    replay = Replay(options.sailor)
    predicted = {record.name: replay.seconds(record) for record in records}
    tables, scores = [], {}
    for group in dict.fromkeys(record.group for record in records):
        members = [record for record in records if record.group == group]
        tables.append("\n".join((group, *_table(members, predicted), "")))
        scores[group] = score(members, predicted)
    scores["all"] = score(records, predicted)
    if options.json:
        options.json.write_text(_figures(records, predicted, scores), "utf-8")
    return "\n".join((*tables, *(f"{name}: {result}" for name, result in scores.items())))


def _table(records: list[Record], predicted: dict[str, float]) -> list[str]:
    rows = [("run", "GPUs", "PP", "DP", "TP", "measured s", "predicted s", "error", "left out")]
    for record in records:
        seconds = predicted[record.name]
        rows.append(
            (
                record.name.partition(" ")[2],
                "+".join(record.kinds),
                str(len(record.stages)),
                str(record.data),
                str(record.tensor),
                f"{record.seconds:.3f}",
                f"{seconds:.3f}",
                f"{100 * (seconds / record.seconds - 1):+.1f} %",
                record.damage,
            )
        )
    return aligned(rows, text={0, 1, 8})


def _figures(records: list[Record], predicted: dict[str, float], scores: dict[str, Score]) -> str:
    runs = [
        {
            "run": record.name,
            "measured_seconds": record.seconds,
            "predicted_seconds": round(predicted[record.name], 5),
            "left_out": record.damage,
        }
        for record in records
    ]
    figures = {
        "source": "https://github.com/eth-easl/sailor, MIT licence, Planner/simulations/validation",
        "runs": runs,
        "scores": {name: vars(result) for name, result in scores.items()},
    }
    return json.dumps(figures, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(main())
