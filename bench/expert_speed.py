"""Measure training of a mixture of experts: mixed, homogeneous, and beside plain megatron-core.

    python bench/expert_speed.py --out expert_speed.json [--layers 6] [--runs one core mixed]

The layers are Qwen3-30B-A3B's: 128 experts of width 768, of which a token passes 8. `one` is one
rank; `core` the same model in plain megatron-core, which computes experts one by one; `pipeline`
two stages of one vendor, `mixed` the same two across vendors; `shared` two ranks of one mesh with
half of the experts each. Two ranks share a GPU where there is one: their figures compare with each
other, not with `one`. `profile` says which kernels a step of `one` consists of.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

from bench.timing.kernel_times import KINDS as KINDS_OF_KERNELS
from bench.timing.kernel_times import kernel_times
from bench.timing.timed_runs import measure, profiled_step, timed_peer, timed_run
from hetero.text import integer
from hetero.tools import tool_command_line
from hetero.tools.runs import SIMULATED, Launch

PEER = Path(__file__).parent / "peers/core_experts.py"
SECONDS = 400.0
PIPELINE = "--pipeline-model-parallel-size 2"
MIXED = "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1"
RANKS = {
    "one": (1, ""),
    "pipeline": (2, PIPELINE),
    "mixed": (2, MIXED),
    "shared": (2, "--expert-model-parallel-size 2"),
}
RUNS = (*RANKS, "core", "profile")
SIZES = {
    "layers": (6, "number of layers"),
    "hidden": (2048, "number of elements of a hidden state"),
    "heads": (32, "number of attention heads"),
    "groups": (4, "number of query groups"),
    "channels": (128, "number of elements of a head"),
    "ffn": (768, "number of elements inside an expert"),
    "experts": (128, "number of experts of a layer"),
    "topk": (8, "number of experts of a token"),
    "sequence": (4096, "number of tokens of a sequence"),
    "batch": (8, "number of sequences of a step"),
    "vocabulary": (32000, "number of tokens of the vocabulary"),
    "steps": (8, "number of steps of each run, of which two warm up"),
}
KINDS = (
    {"grouped products": r"GroupProblemShape|grouped"}
    | KINDS_OF_KERNELS
    | {"order of tokens": r"index|gather|sort|scan|nonzero|Radix|repeat_interleave"}
)


def model_flags(args: argparse.Namespace) -> list[str]:
    words = (
        f"--num-layers {args.layers} --hidden-size {args.hidden} --ffn-hidden-size {args.ffn} "
        f"--num-attention-heads {args.heads} --group-query-attention --kv-channels {args.channels} "
        f"--num-query-groups {args.groups} --seq-length {args.sequence} --qk-layernorm "
        f"--max-position-embeddings {args.sequence} --position-embedding-type rope "
        "--rotary-base 1000000 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu "
        "--disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 "
        f"--attention-dropout 0 --bf16 --num-experts {args.experts} "
        f"--moe-ffn-hidden-size {args.ffn} --moe-router-topk {args.topk} "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 "
        "--moe-token-dispatcher-type alltoall "
        f"--micro-batch-size 1 --global-batch-size {args.batch} --train-iters {args.steps} "
        "--lr 1e-4 --clip-grad 1 --use-distributed-optimizer --mock-data --eval-iters 0 "
        f"--tokenizer-type NullTokenizer --vocab-size {args.vocabulary - 1} --log-interval 1 "
        "--num-workers 1 --cross-entropy-loss-fusion"
    )
    return words.split()


def ours(args: argparse.Namespace, folder: Path, name: str, *more: str) -> dict[str, Any]:
    """Tokens a second and the peaks of the ranks' memory of one run, or why there are none."""
    nproc, own = RANKS[name]
    launch = Launch(
        name=f"{name}{len(more)}",
        flags=(*model_flags(args), *own.split(), *more),
        nproc=nproc,
        folder=folder,
        environ=SIMULATED if nproc > 1 else {},
        deadline=SECONDS,
    )
    return timed_run(launch, tokens=args.sequence * args.batch)


def peer(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    sizes = [f"--{name}={getattr(args, name)}" for name in SIZES]
    tokens = args.sequence * args.batch
    return timed_peer("plain megatron-core", PEER, sizes, folder, nproc=1, tokens=tokens)


def profile(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Milliseconds of one step's kernels by kind, and how long the GPU was idle."""
    read = partial(kernel_times, kinds_of=KINDS)
    return profiled_step(partial(ours, args, folder, "one"), folder / "traces", step=3, read=read)


def record(args: argparse.Namespace) -> str:
    model = {name: getattr(args, name) for name in SIZES}
    return measure("expert_speed.py", args, model=model, rows=partial(rows_of, args))


def rows_of(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, name in enumerate(args.runs):
        own = folder / str(number)
        own.mkdir()
        if name in RANKS:
            yield f"{number} {name}", ours(args, own, name)
        elif not args.on_cpu:
            yield f"{number} {name}", (peer if name == "core" else profile)(args, own)


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument(
        "--runs",
        nargs="+",
        choices=RUNS,
        default=list(RUNS),
        help="which runs, in this order; a name may come twice; default: each once",
    )
    for name, (value, what) in SIZES.items():
        parser.add_argument(f"--{name}", type=integer(1), default=value, help=what)
    parser.add_argument(
        "--on-cpu", action="store_true", help="without a GPU, and without peer and profile"
    )
    args = parser.parse_args(argv)
    args.typed = list(sys.argv[1:] if argv is None else argv)
    tool_command_line.require_results_file(args.out, "--out")
    return tool_command_line.run(lambda: record(args))


if __name__ == "__main__":
    sys.exit(main())
