"""Plan how to train a model on nodes of several kinds: what to run, what it reaches and why.

    hetero plan --cluster cluster.yaml --model llama3-8b --global-batch 1024

writes plan.yaml and flags.yaml, which pretrain_gpt.py runs as they are, report.html, and the step
as trace.json for Perfetto. Without a profile (hetero profile-layers) costs are computed from what
vendors publish. Exit code 2: bad input, or a model that fits nowhere; then nothing is written.
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

    sys.exit(cli.main(["plan", *sys.argv[1:]]))

from hetero.plan.plan import FP8_FORMATS, RECOMPUTE
from hetero.planner.fp8 import RECIPES
from hetero.planner.solution import solve
from hetero.text import integer, number
from hetero.tools.planning.plan_files import write_solution
from hetero.tools.planning.planning_request import PlanningRequest, infeasible_error, read_request
from hetero.tools.planning.sequence_length import add_seq_length
from hetero.tools.planning.solution_table import solution_text
from hetero.tools.planning.what_if import SWEEPS, sweep
from hetero.tools.tool_command_line import Parser, run
from megatron.hetero.console import progress_bar


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = _parse(argv)
    return run(lambda: _plan(options, argv), interrupted="nothing was written")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--cluster", type=Path, required=True, metavar="FILE", help="the nodes")
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="a file of Megatron's flags, a preset by its name, or Hugging Face's config.json, or "
        "a folder with one",
    )
    parser.add_argument("--global-batch", type=integer(1), required=True, help="samples of a step")
    add_seq_length(
        parser, default="the model file's; for a config.json, 4096 or what the model can process"
    )
    parser.add_argument(
        "--profile",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="what hetero profile-layers measured; accelerators that it lacks are computed, "
        "as fast beside their peak as the first one that was measured",
    )
    for flag, what, default in (
        ("--tensor", "tensor-parallel sizes to choose from", [1, 2, 4, 8]),
        ("--micro-batch", "micro-batch sizes to choose from", [1, 2, 4, 8]),
        ("--interleave", "model chunks of a stage to choose from", [1]),
    ):
        parser.add_argument(flag, nargs="+", type=integer(1), default=default, help=what)
    parser.add_argument(
        "--context",
        nargs="+",
        type=integer(1),
        metavar="N",
        help="context-parallel sizes to choose from; default: 1, and powers of two up to a node "
        "that leave each rank 8192 tokens of a sequence",
    )
    parser.add_argument(
        "--experts",
        nargs="+",
        type=integer(1),
        metavar="N",
        help="expert-parallel sizes to choose from; default: all up to a node that divide the "
        "model's experts",
    )
    parser.add_argument(
        "--expert-imbalance",
        type=number(minimum=1),
        default=1.2,
        help="tokens of the expert-parallel rank that has most, in parts of the mean; default: 1.2",
    )
    parser.add_argument(
        "--recompute",
        nargs="+",
        choices=RECOMPUTE,
        default=["none", "full"],
        help="recomputations to choose from",
    )
    parser.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="tensor-parallel ranks divide the sequence between their layers, as they always do "
        "in a mixture of experts",
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="what is trained in"
    )
    parser.add_argument(
        "--fp8-format",
        choices=FP8_FORMATS,
        help="compute linear layers in fp8 where a GPU can; default: as the model file says",
    )
    parser.add_argument(
        "--fp8-recipe",
        choices=RECIPES,
        help="what is scaled at a time; default: the model file's, or delayed",
    )
    parser.add_argument(
        "--no-distributed-optimizer",
        action="store_true",
        help="every replica keeps all of the optimizer's state",
    )
    parser.add_argument(
        "--no-replicas",
        action="store_true",
        help="look at pipelines across kinds of nodes alone, not at whole replicas on each",
    )
    parser.add_argument(
        "--reserved-gib",
        type=number(minimum=0),
        default=1.5,
        help="memory of each GPU that no model holds",
    )
    parser.add_argument(
        "--what-if",
        nargs="+",
        choices=SWEEPS,
        default=[],
        help="further questions, a plot each: other numbers of nodes, other links between kinds, "
        "a slower vendor, another split of the layers",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/plan"), metavar="FOLDER", help="for the results"
    )
    return parser.parse_args(argv)


def _plan(options: argparse.Namespace, argv: Sequence[str]) -> str:
    request: PlanningRequest = read_request(options)
    with progress_bar(total=0, leave=False, bar_format="{desc} [{elapsed}]") as bar:
        found = solve(request.problem, progress=bar.set_description)
        if found is None:
            raise infeasible_error(request)
        sweeps = []
        for name in dict.fromkeys(options.what_if):
            sweeps += sweep(name, request.problem, found, progress=bar.set_description)
    written = write_solution(options.out, request, found, sweeps, command=["hetero", "plan", *argv])
    return "\n".join([solution_text(request, found), "", *written])
