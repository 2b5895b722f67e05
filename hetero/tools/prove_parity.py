"""Prove that a mixed run computes what a homogeneous one does, on the machine at hand.

Runs pretrain_gpt.py as a homogeneous pipeline and, with the same flags, as a mixed one over each
transport, and compares every loss and the final weights bit for bit:

    hetero prove-parity --nproc 2 --transports gloo shm --out runs/parity -- \\
        --num-layers 16 ... --train-iters 20 --bf16 --deterministic-mode

One machine plays both vendors, so what it proves is the software, not a vendor's kernels: the
result says `simulated`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero import cli

    sys.exit(cli.main(["prove-parity", *sys.argv[1:]]))

from hetero.errors import UserError
from hetero.text import integer
from hetero.tools import tool_command_line
from hetero.tools.reports.page import write_whole
from hetero.tools.run_comparison.alignment import compare_bitwise
from hetero.tools.runs import (
    SIMULATED,
    Finished,
    Launch,
    homogeneous_flags,
    mixed_flags,
    run_to_end,
)
from megatron.hetero.arguments import parse_args

HOMOGENEOUS = "homogeneous"


def flags_of_runs(options: argparse.Namespace) -> dict[str, list[str]]:
    """All flags of the homogeneous run and of the mixed ones, by name of the run."""
    stages = homogeneous_flags(stages=sum(options.sizes), layers=options.layers)
    flags = {HOMOGENEOUS: [*options.flags, *stages]}
    for transport in options.transports:
        mixed = mixed_flags(
            vendors=options.vendors,
            sizes=options.sizes,
            layers=options.layers,
            transport=transport,
        )
        flags[f"mixed-{transport}"] = [*options.flags, *mixed]
    return flags


def prove(options: argparse.Namespace) -> bool:
    """Run all and compare them; whether every mixed run computed what the homogeneous one did."""
    flags = flags_of_runs(options)
    for name, words in flags.items():
        # A launcher would answer bad flags with an exit code and pages of its own.
        args = parse_args(words, world_size=options.nproc)
        if name == HOMOGENEOUS and (args.hetero_pipeline or args.hetero_data_parallel):
            raise UserError(
                "the flags behind -- would make the homogeneous run a mixed one; leave "
                "--hetero-pipeline, --hetero-data-parallel and what belongs to them out: "
                "--vendors, --sizes and --layers shape the mixed runs"
            )
    out = tool_command_line.make_results_folder(options.out)
    runs = {
        name: run_to_end(
            Launch(
                name=name,
                flags=tuple(words),
                nproc=options.nproc,
                folder=out,
                environ={} if name == HOMOGENEOUS else SIMULATED,
            )
        )
        for name, words in flags.items()
    }
    return conclude(runs, flags=options.flags, out=out)


def conclude(runs: Mapping[str, Finished], *, flags: Sequence[str], out: Path) -> bool:
    """Write and print the comparison of all runs with the homogeneous one; whether all agree."""
    baseline = runs[HOMOGENEOUS]
    reference = baseline.curve(HOMOGENEOUS)
    mixed = [name for name in runs if name != HOMOGENEOUS]
    comparisons = {name: compare_bitwise(runs[name].curve(name), reference) for name in mixed}
    record = {
        "runs": [_run_mapping(name, run) for name, run in runs.items()],
        "comparisons": [
            {
                "run": name,
                "losses_identical": bitwise.losses_identical,
                "weights_identical": bitwise.weights_identical,
                "max_abs_loss_difference": bitwise.loss_difference,
                "speed_ratio": _tokens_per_s(runs[name]) / _tokens_per_s(baseline),
            }
            for name, bitwise in comparisons.items()
        ],
        "flags": list(flags),
    }
    write_whole(out / "parity.json", json.dumps(record, indent=1) + "\n")
    print(
        f"{'run':<16}{'losses':>11}{'weights':>11}{'max |dloss|':>13}{'tokens/s':>12}{'TFLOP/s':>9}"
    )
    print(f"{HOMOGENEOUS:<16}{'':>11}{'':>11}{'':>13}{_speed(baseline)}")
    for name, bitwise in comparisons.items():
        words = [
            "identical" if same else "DIFFER"
            for same in (bitwise.losses_identical, bitwise.weights_identical)
        ]
        print(
            f"{name:<16}{words[0]:>11}{words[1]:>11}{bitwise.loss_difference:>13.3g}"
            f"{_speed(runs[name])}"
        )
    if any(run.report["simulated"] for run in runs.values()):
        print("vendors simulated: one machine played both")
    return all(bitwise.identical for bitwise in comparisons.values())


def _run_mapping(name: str, run: Finished) -> dict[str, Any]:
    return {
        "name": name,
        "losses": [row["loss"] for row in run.iterations],
        "grad_norms": [row["grad_norm"] for row in run.iterations],
        "weights": run.report["weights"]["sha256"],
        "tokens_per_s": _tokens_per_s(run),
        "tflops_per_gpu": run.steady("tflops_per_gpu"),
        "boundary_bytes": run.report["boundary_bytes"],
        "simulated": run.report["simulated"],
    }


def _tokens_per_s(run: Finished) -> float:
    return run.steady("tokens_per_s")


def _speed(run: Finished) -> str:
    return f"{_tokens_per_s(run):>12,.0f}{run.steady('tflops_per_gpu'):>9.1f}"


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--nproc", type=integer(1), default=2, help="processes on this machine")
    parser.add_argument(
        "--vendors", nargs="+", default=["amd", "nvidia"], help="of each mesh, in pipeline order"
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=integer(1),
        default=[1, 1],
        help="stages of each mesh",
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        type=integer(1),
        help="layers of each stage, mixed runs",
    )
    parser.add_argument(
        "--transports", nargs="+", default=["auto"], help="of the mixed runs, one run for each"
    )
    parser.add_argument("--out", default="runs/parity", help="folder for the results and the logs")
    options, flags = parser.parse_with_run_flags(argv)
    if not flags:
        parser.error("put the flags of pretrain_gpt.py behind --")
    options.flags = flags
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    agreed: list[bool] = []

    def work() -> str:
        agreed.append(prove(options))
        return f"written: parity.json in {options.out}"

    code = tool_command_line.run(work)
    return code or int(not all(agreed))
