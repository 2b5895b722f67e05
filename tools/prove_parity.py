"""Prove that a mixed run computes what a homogeneous one does, on the machine at hand.

Runs pretrain_gpt.py as a homogeneous pipeline and, with the same flags, as a mixed one over each
transport, and compares every loss and the final weights bit for bit:

    python tools/prove_parity.py --nproc 2 --transports gloo nccl --out runs/parity -- \\
        --num-layers 16 ... --train-iters 20 --bf16 --deterministic-mode

One machine plays both vendors, so what it proves is the software, not a vendor's kernels: the
result says `simulated`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tools.command_line import begin_script

    begin_script()

from megatron.training.arguments import parse_args
from tools import command_line
from tools.runs import SIMULATED, Launch, homogeneous_flags, mixed_flags, run_to_end

HOMOGENEOUS = "homogeneous"


@dataclass(frozen=True)
class RunResult:
    """What one training run left behind."""

    name: str
    losses: list[float]
    grad_norms: list[float | None]
    weights: str
    tokens_per_s: float
    tflops_per_gpu: float
    boundary_bytes: int
    simulated: bool


@dataclass(frozen=True)
class Comparison:
    """A mixed run beside the homogeneous one."""

    run: str
    losses_identical: bool
    weights_identical: bool
    max_abs_loss_difference: float
    speed_ratio: float
    """Tokens per second over the homogeneous run's."""


def run_once(
    name: str, flags: Sequence[str], *, nproc: int, out: Path, environ: Mapping[str, str]
) -> RunResult:
    """Train once and read back what the run wrote."""
    finished = run_to_end(
        Launch(name=name, flags=tuple(flags), nproc=nproc, folder=out, environ=environ)
    )
    rows, summary = finished.iterations, finished.report
    # The first iterations pay for compilation and for buffers.
    steady = rows[min(3, len(rows) - 1) :]
    return RunResult(
        name=name,
        losses=[row["loss"] for row in rows],
        grad_norms=[row["grad_norm"] for row in rows],
        weights=summary["weights"]["sha256"],
        tokens_per_s=statistics.median(row["tokens_per_s"] for row in steady),
        tflops_per_gpu=statistics.median(row["tflops_per_gpu"] for row in steady),
        boundary_bytes=summary["boundary_bytes"],
        simulated=summary["simulated"],
    )


def compare(run: RunResult, baseline: RunResult) -> Comparison:
    pairs = list(zip(run.losses, baseline.losses, strict=True))
    return Comparison(
        run=run.name,
        losses_identical=run.losses == baseline.losses and run.grad_norms == baseline.grad_norms,
        weights_identical=run.weights == baseline.weights,
        max_abs_loss_difference=max(abs(a - b) for a, b in pairs),
        speed_ratio=run.tokens_per_s / baseline.tokens_per_s,
    )


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


def prove(options: argparse.Namespace) -> list[Comparison]:
    flags = flags_of_runs(options)
    for words in flags.values():
        # A launcher would answer bad flags with an exit code and pages of its own.
        parse_args(words, world_size=options.nproc)
    out = command_line.make_results_folder(options.out)
    baseline, *runs = [
        run_once(
            name,
            words,
            nproc=options.nproc,
            out=out,
            environ={} if name == HOMOGENEOUS else SIMULATED,
        )
        for name, words in flags.items()
    ]
    comparisons = [compare(run, baseline) for run in runs]
    record = {
        "runs": [asdict(run) for run in (baseline, *runs)],
        "comparisons": [asdict(comparison) for comparison in comparisons],
        "flags": options.flags,
    }
    (out / "parity.json").write_text(json.dumps(record, indent=1))
    print(
        f"{'run':<16}{'losses':>11}{'weights':>11}{'max |dloss|':>13}{'tokens/s':>12}{'TFLOP/s':>9}"
    )
    print(f"{HOMOGENEOUS:<16}{'':>11}{'':>11}{'':>13}", end="")
    print(f"{baseline.tokens_per_s:>12,.0f}{baseline.tflops_per_gpu:>9.1f}")
    for run, result in zip(runs, comparisons, strict=True):
        words = [
            "identical" if same else "DIFFER"
            for same in (result.losses_identical, result.weights_identical)
        ]
        print(
            f"{run.name:<16}{words[0]:>11}{words[1]:>11}{result.max_abs_loss_difference:>13.3g}"
            f"{run.tokens_per_s:>12,.0f}{run.tflops_per_gpu:>9.1f}"
        )
    if any(run.simulated for run in runs):
        print("vendors simulated: one machine played both")
    return comparisons


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.Parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--nproc", type=int, default=2, help="processes on this machine")
    parser.add_argument(
        "--vendors", nargs="+", default=["amd", "nvidia"], help="of each mesh, in pipeline order"
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 1], help="stages of each mesh")
    parser.add_argument("--layers", nargs="+", type=int, help="layers of each stage, mixed runs")
    parser.add_argument(
        "--transports", nargs="+", default=["auto"], help="of the mixed runs, one run for each"
    )
    parser.add_argument("--out", default="runs/parity", help="folder for the results and the logs")
    given = list(sys.argv[1:] if argv is None else argv)
    cut = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:cut])
    if cut + 1 >= len(given):
        parser.error("put the flags of pretrain_gpt.py behind --")
    options.flags = given[cut + 1 :]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    comparisons: list[Comparison] = []

    def work() -> str:
        comparisons.extend(prove(options))
        return f"written: parity.json in {options.out}"

    code = command_line.run(work)
    return code or int(not all(c.losses_identical and c.weights_identical for c in comparisons))


if __name__ == "__main__":
    sys.exit(main())
