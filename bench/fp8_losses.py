"""Train a model in bf16 and in fp8 on real text, and say whether their losses can be told apart.

    python bench/fp8_losses.py --out fp8_losses.json
    python bench/fp8_losses.py --on-cpu --out fp8_losses.json --iterations 200 --layers 4
        --hidden 128 --heads 4 --groups 2 --ffn 352 --sequence 128 --batch 8 --micro-batch 4

bf16 runs with three seeds, fp8 with the first of them. On a GPU each run is one process, in the
GPU's own types, and all of them share the GPU. On CPU every fp8 run is a pipeline of two stages: of
one type, of the other, and of both. A smoothed point is the mean over a tenth of the iterations. Of
those of a run, 95 % have to lie in the band that one more seed would lie in 99 times in 100. The
text is what every machine with PyTorch has: nothing is downloaded. It is no benchmark of speed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

import json

import numpy as np
import torch

from bench.parity_benchmark.side_by_side import Outcome, run_side_by_side
from bench.real_text.data_set import RealText, build_from_documents
from bench.real_text.text_sources import SOURCES, source_documents
from hetero.errors import HeteroError
from hetero.text import counted, integer, number
from hetero.tools import tool_command_line
from hetero.tools.run_comparison.alignment import align, relative_difference
from hetero.tools.run_comparison.comparison import Comparison, Options, compare
from hetero.tools.run_comparison.criteria import RULES, Criterion
from hetero.tools.run_comparison.curves import Curve, smoothed_loss
from hetero.tools.runs import SIMULATED, Launch

ENVELOPE = "envelope"
SEEDS = (1, 2, 3)
RECIPES = {
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "rowwise": "--fp8-format hybrid --fp8-recipe rowwise",
    "delayed": "--fp8-format hybrid --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
}
VENDORS = {"fn": "nvidia", "fnuz": "amd"}
"""By the types that a CPU has in their place."""
PIPELINES = (("fn", "fn"), ("fnuz", "fnuz"), ("fn", "fnuz"))
CHARACTERS_PER_TOKEN = 3.6
"""More than a token of such text has on average, so that few runs see any of it twice."""
FEWEST_CHARACTERS = 1_000_000
"""For the tokenizer."""
SIZES = {
    "layers": (16, "number of layers"),
    "hidden": (768, "number of elements of a hidden state"),
    "heads": (12, "number of attention heads"),
    "groups": (4, "number of query groups"),
    "ffn": (2048, "number of elements inside an MLP"),
    "sequence": (1024, "number of tokens of a sequence"),
    "micro-batch": (8, "number of sequences of a micro-batch"),
    "batch": (16, "number of sequences of an iteration"),
    "iterations": (500, "number of iterations of each run"),
}
FEWEST_ITERATIONS = 20
"""Of which a tenth is smoothed over."""


@dataclass(frozen=True)
class Run:
    """One training run; `recipe` None: in bf16."""

    recipe: str | None = None
    seed: int = SEEDS[0]
    types: tuple[str, ...] = ()
    """Of a pipeline, those of its stages; empty: one process with its own."""

    @property
    def name(self) -> str:
        if self.recipe is None:
            return f"bf16, seed {self.seed}"
        return ", ".join([self.recipe, *(["|".join(self.types)] if self.types else [])])

    @property
    def processes(self) -> int:
        return max(1, len(self.types))


def planned_runs(recipes: Sequence[str], *, on_cpu: bool) -> list[Run]:
    """Those of several processes first: what is started last should not take longest."""
    placed = PIPELINES if on_cpu else ((),)
    in_fp8 = [Run(recipe, types=types) for recipe in recipes for types in placed]
    return [*in_fp8, *(Run(seed=seed) for seed in SEEDS)]


def run_flags(args: argparse.Namespace, run: Run) -> list[str]:
    """All flags of a run but those of its data."""
    words = (
        f"--num-layers {args.layers} --hidden-size {args.hidden} --ffn-hidden-size {args.ffn} "
        f"--num-attention-heads {args.heads} --group-query-attention "
        f"--num-query-groups {args.groups} --seq-length {args.sequence} "
        f"--max-position-embeddings {args.sequence} --position-embedding-type rope "
        "--normalization RMSNorm --swiglu --disable-bias-linear "
        "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16 "
        f"--micro-batch-size {args.micro_batch} --global-batch-size {args.batch} "
        f"--train-iters {args.iterations} --lr {args.lr:g} --min-lr {args.lr / 10:g} "
        "--lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.1 --clip-grad 1.0 "
        f"--adam-beta2 0.95 --eval-iters 0 --log-interval 100 --split 100,0,0 --seed {run.seed}"
    ).split()
    if run.recipe is not None:
        words += RECIPES[run.recipe].split()
    if run.types:
        vendors = [VENDORS[name] for name in run.types]
        words += ["--hetero-pipeline", "--hetero-vendors", *vendors]
        words += ["--hetero-pipeline-sizes", *("1" for _ in vendors)]
    return words


def build_text(args: argparse.Namespace, folder: Path, cores: int) -> RealText:
    tokens = args.iterations * args.batch * args.sequence
    characters = max(FEWEST_CHARACTERS, round(CHARACTERS_PER_TOKEN * tokens))
    folder.mkdir()
    return build_from_documents(folder, source_documents(characters), workers=min(8, cores))


def train(
    args: argparse.Namespace, runs: Sequence[Run], folder: Path, *, finish_by: float
) -> dict[Run, Outcome]:
    cores = len(os.sched_getaffinity(0))
    data = build_text(args, folder / "data", cores)
    print(f"text: {counted(data.tokens, 'token')}", flush=True)
    at_once = args.at_once or (max(1, cores // 2) if args.on_cpu else len(runs))
    threads = {"OMP_NUM_THREADS": str(max(1, cores // (2 * at_once)))}
    launches = [
        Launch(
            name=f"run_{number}",
            flags=(*run_flags(args, run), *data.flags_with_cache(folder / f"cache_{number}")),
            nproc=run.processes,
            folder=folder,
            environ=threads | (SIMULATED if run.types else {}),
        )
        for number, run in enumerate(runs)
    ]
    names = {launch.name: run.name for launch, run in zip(launches, runs, strict=True)}

    def announce(outcome: Outcome) -> None:
        words = outcome.problem or counted(args.iterations, "iteration")
        print(f"{names[outcome.launch.name]}: {words} ({outcome.seconds:.0f} s)", flush=True)

    here: list[dict[str, str]] = [{} for _ in range(at_once)]
    outcomes = run_side_by_side(launches, here, finish_by=finish_by, announce=announce)
    return dict(zip(runs, outcomes, strict=True))


def compared(outcomes: dict[Run, Outcome]) -> Comparison:
    """fp8 beside the seeds of bf16. Raises HeteroError where one of those has failed."""
    curves: dict[Run, Curve] = {}
    for run, outcome in outcomes.items():
        if outcome.finished is not None:
            curves[run] = replace(outcome.finished.curve(run.name), weights="")
        elif run.recipe is None:
            raise HeteroError(f"{run.name} has no losses to compare with: {outcome.problem}")
    reference, *seeds = (curves[Run(seed=seed)] for seed in SEEDS)
    candidates = [curve for run, curve in curves.items() if run.recipe is not None]
    criteria = (Criterion(ENVELOPE, RULES[ENVELOPE][0]),)
    return compare(
        align(reference, seeds=seeds, candidates=candidates),
        Options(criteria=criteria, same_seed=True),
    )


def judged(comparison: Comparison) -> dict[str, Any]:
    """Of each fp8 run: smoothed losses beside those of the seeds, and of the same seed in bf16."""
    aligned, window = comparison.aligned, comparison.window
    band = comparison.envelopes["loss"]
    same_seed = smoothed_loss(aligned.reference, window)
    rows = {}
    for verdict in comparison.verdicts:
        curve = verdict.candidate
        smoothed = smoothed_loss(curve, window)
        apart = np.abs(relative_difference(curve.loss, aligned.reference.loss))
        rows[curve.name] = {
            "passed": verdict.passed,
            "share_inside": band.share_inside(smoothed),
            "final": round(float(smoothed[-1]), 5),
            "final_beside_same_seed": _rounded(smoothed[-1] / same_seed[-1] - 1),
            "final_beside_mean_of_seeds": _rounded(smoothed[-1] / band.centre[-1] - 1),
            "of_each_iteration_beside_same_seed": {
                "mean": _rounded(apart.mean()),
                "largest": _rounded(apart.max()),
            },
        }
    seeds = [smoothed_loss(each, window)[-1] for each in (aligned.reference, *aligned.seeds)]
    return {
        "smoothed_over": window,
        "final_of_seeds": [round(float(final), 5) for final in seeds],
        "half_width_of_band_at_end": _rounded(band.high[-1] / band.centre[-1] - 1),
        "runs": rows,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def measure(args: argparse.Namespace) -> str:
    gpus = torch.cuda.device_count()
    if not gpus and not args.on_cpu:
        raise HeteroError(
            "a model of this size needs a GPU; --on-cpu trains on the CPU, and takes minutes with "
            "--layers 4 --hidden 128"
        )
    runs = planned_runs(args.recipes, on_cpu=args.on_cpu)
    with tempfile.TemporaryDirectory(prefix="fp8-losses-") as name:
        finish_by = time.monotonic() + 60 * args.minutes
        outcomes = train(args, runs, Path(name), finish_by=finish_by)
        comparison = compared(outcomes)
    judgement = judged(comparison)
    cores = counted(len(os.sched_getaffinity(0)), "core")
    record = {
        "command": " ".join(["python bench/fp8_losses.py", *args.typed]),
        "date": date.today().isoformat(),
        "hardware": f"CPU, {cores}" if args.on_cpu else f"1x {torch.cuda.get_device_name()}",
        "torch": torch.__version__,
        "text": SOURCES,
        "model": {name: getattr(args, name.replace("-", "_")) for name in SIZES} | {"lr": args.lr},
        **judgement,
        "failed": {run.name: each.problem for run, each in outcomes.items() if each.problem},
        "losses": {
            run.name: [round(float(row["loss"]), 5) for row in each.finished.iterations]
            for run, each in outcomes.items()
            if each.finished is not None
        },
    }
    args.out.write_text(json.dumps(record) + "\n")
    return f"{table(judgement)}\nwritten: {args.out}"


def table(judgement: dict[str, Any]) -> str:
    lines = [
        f"bf16: {', '.join(map(str, judgement['final_of_seeds']))}, means over the last "
        f"{counted(judgement['smoothed_over'], 'iteration')}; the band at the end is "
        f"{judgement['half_width_of_band_at_end']:.2%} to both sides"
    ]
    for name, row in judgement["runs"].items():
        lines.append(
            f"{name}: {row['final']}, {row['final_beside_same_seed']:+.2%} beside the same seed; "
            f"{row['share_inside']:.0%} of its points inside: {'pass' if row['passed'] else 'FAIL'}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument(
        "--recipes",
        nargs="+",
        choices=tuple(RECIPES),
        default=list(RECIPES),
        help="which recipes of fp8; default: all",
    )
    for name, (value, what) in SIZES.items():
        least = FEWEST_ITERATIONS if name == "iterations" else 1
        parser.add_argument(f"--{name}", type=integer(least), default=value, help=what)
    parser.add_argument("--lr", type=number(above=0), default=6e-4, help="learning rate")
    parser.add_argument(
        "--minutes",
        type=number(above=0),
        default=8,
        help="number of minutes after which runs that still go on are ended",
    )
    parser.add_argument(
        "--at-once",
        type=integer(1),
        help="number of runs at a time; default: all on a GPU, one for two cores on CPU",
    )
    parser.add_argument("--on-cpu", action="store_true", help="pipelines of both types, on CPU")
    args = parser.parse_args(argv)
    args.typed = list(sys.argv[1:] if argv is None else argv)
    tool_command_line.require_results_file(args.out, "--out")
    return tool_command_line.run(lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
