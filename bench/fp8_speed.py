"""Measure training in fp8: beside bf16, across vendors, and beside torchao's linear layers.

    python bench/fp8_speed.py --out fp8_speed.json [--layers 32] [--first-stage 17] \\
        [--runs pipeline-bf16 pipeline mixed]

The layers are LLaMA-3-8B's. `one` and `one-bf16` are one GPU; `torchao` and `torch` the same layers
in plain PyTorch, compiled, on one GPU, with weights and moments in bf16. `pipeline`,
`pipeline-bf16` and `mixed` are two stages on two GPUs, of one vendor and across vendors. `profile`
and `profile-bf16` say which kernels a step of one GPU consists of.
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
from megatron.hetero.arguments.flags_training import FP8_RECIPES

PEER = Path(__file__).parent / "peers/torch_llama.py"
SECONDS = 400.0
ONE, PIPELINE, MIXED = "one", "pipeline", "mixed"
PEERS = {"torch": (), "torchao": ("--fp8", "tensorwise")}
BF16 = "-bf16"
PROFILE = "profile"
RUNS = (ONE, f"{ONE}{BF16}", *PEERS, PROFILE, f"{PROFILE}{BF16}")
RUNS += (PIPELINE, f"{PIPELINE}{BF16}", MIXED, f"{MIXED}{BF16}")
SHAPE = {
    "layers": (8, "number of layers"),
    "hidden": (4096, "number of elements of a hidden state"),
    "ffn": (14336, "number of elements inside the MLP"),
    "heads": (32, "number of attention heads"),
    "groups": (8, "number of query groups"),
    "sequence": (4096, "number of tokens of a sequence"),
    "vocabulary": (128256, "number of tokens of the vocabulary"),
    "steps": (8, "number of steps of each run, of which two warm up"),
}
KINDS = KINDS_OF_KERNELS | {
    "casts, SwiGLU": r"_cast_tile|swiglu|silu",
    "norms": r"rms|norm",
    "cross entropy": r"log_softmax|nll|cross_entropy",
}


def flags_of(args: argparse.Namespace, name: str) -> tuple[int, list[str]]:
    """Ranks and flags of a run of ours."""
    kind, is_bf16 = name.removesuffix(BF16), name.endswith(BF16)
    first = args.layers // 2 if args.first_stage is None else args.first_stage
    words = (
        f"--num-layers {args.layers} --hidden-size {args.hidden} --ffn-hidden-size {args.ffn} "
        f"--num-attention-heads {args.heads} --group-query-attention "
        f"--num-query-groups {args.groups} --seq-length {args.sequence} "
        f"--max-position-embeddings {args.sequence} --position-embedding-type rope "
        "--rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear "
        "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16 "
        f"--micro-batch-size {args.micro} --global-batch-size {args.micro * args.batch} "
        f"--train-iters {args.steps} --lr 1e-4 --clip-grad 1 --use-distributed-optimizer "
        "--mock-data --eval-iters 0 --tokenizer-type NullTokenizer --log-interval 1 "
        f"--vocab-size {args.vocabulary - 1} --num-workers 1 --cross-entropy-loss-fusion"
    )
    flags = words.split()
    if not is_bf16:
        flags += ["--fp8-format", "hybrid", "--fp8-recipe", args.recipe]
    if kind == PIPELINE:
        flags += ["--pipeline-model-parallel-size", "2"]
        flags += ["--decoder-first-pipeline-num-layers", str(first)]
    if kind == MIXED:
        flags += "--hetero-pipeline --hetero-vendors nvidia amd --hetero-pipeline-sizes 1 1".split()
        flags += ["--hetero-pipeline-layers", str(first), str(args.layers - first)]
    return (2 if kind in (PIPELINE, MIXED) else 1), flags


def ours(args: argparse.Namespace, folder: Path, name: str, *more: str) -> dict[str, Any]:
    """Tokens a second and the peaks of the ranks' memory of one run, or why there are none."""
    nproc, flags = flags_of(args, name)
    launch = Launch(
        name=f"{name}{len(more)}",
        flags=(*flags, *more),
        nproc=nproc,
        folder=folder,
        environ=SIMULATED if nproc > 1 else {},
        deadline=SECONDS,
    )
    return timed_run(launch, tokens=args.sequence * args.micro * args.batch)


def peer(args: argparse.Namespace, folder: Path, name: str) -> dict[str, Any]:
    sizes = [f"--{size}={getattr(args, size)}" for size in (*SHAPE, "batch", "micro")]
    tokens = args.sequence * args.micro * args.batch
    words = [*sizes, "--compiled", *PEERS[name]]
    return timed_peer(name, PEER, words, folder, nproc=1, tokens=tokens)


def profile(args: argparse.Namespace, folder: Path, name: str) -> dict[str, Any]:
    """Milliseconds of one step's kernels by kind, and how long the GPU was idle."""
    run = partial(ours, args, folder, name.replace(PROFILE, ONE))
    read = partial(kernel_times, kinds_of=KINDS)
    return profiled_step(run, folder / "traces", step=3, read=read)


def record(args: argparse.Namespace) -> str:
    model = {name: getattr(args, name) for name in (*SHAPE, "batch", "micro", "recipe")}
    return measure("fp8_speed.py", args, model=model, rows=partial(rows_of, args))


def rows_of(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, name in enumerate(args.runs):
        own = folder / str(number)
        own.mkdir()
        if name in PEERS:
            row = peer(args, own, name)
        elif name.startswith(PROFILE):
            row = profile(args, own, name)
        else:
            row = ours(args, own, name)
        yield f"{number} {name}", row


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument(
        "--runs",
        nargs="+",
        choices=RUNS,
        default=[ONE, f"{ONE}{BF16}"],
        help=f"which runs, in this order; a name may come twice; default: {ONE} {ONE}{BF16}",
    )
    for name, (value, what) in SHAPE.items():
        parser.add_argument(f"--{name}", type=integer(1), default=value, help=what)
    parser.add_argument(
        "--batch", type=integer(1), default=16, help="number of micro-batches of a step"
    )
    parser.add_argument(
        "--micro", type=integer(1), default=1, help="number of sequences of a micro-batch"
    )
    parser.add_argument(
        "--first-stage", type=integer(1), help="number of layers of the first stage; default: half"
    )
    parser.add_argument(
        "--recipe", choices=FP8_RECIPES[:3], default="delayed", help="of fp8; default: delayed"
    )
    parser.add_argument("--on-cpu", action="store_true", help="without a GPU")
    args = parser.parse_args(argv)
    args.typed = list(sys.argv[1:] if argv is None else argv)
    tool_command_line.require_results_file(args.out, "--out")
    return tool_command_line.run(lambda: record(args))


if __name__ == "__main__":
    sys.exit(main())
