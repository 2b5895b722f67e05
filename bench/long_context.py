"""Measure training on long sequences that two GPUs share, beside torch's own context parallelism.

    python bench/long_context.py --out long_context.json [--sequences 32768 131072] [--layers 8]

For each length: one GPU; two GPUs that share the sequences, by each --cp-comm-type; and the same
model in plain PyTorch with FSDP2 and `torch.distributed.tensor.experimental.context_parallel`. All
recompute every layer and train one sequence a step in bfloat16. The layers are LLaMA-8B's, the
vocabulary is a quarter of its: the logits of a whole sequence have to fit one GPU. Of one more run
on a ring torch's profiler says how long keys and values were under way and for how much of that
time the GPU computed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.timing.timed_runs import profiled_step, timed_peer, timed_run
from hetero.errors import HeteroError
from hetero.text import counted, integer
from hetero.tools import tool_command_line
from hetero.tools.runs import Launch
from megatron.hetero import context_parallel

PEER = Path(__file__).parent / "peers/torch_llama.py"
SECONDS = 300.0
TYPES = ("p2p", "a2a", "all_gather")
ALONE, PEER_RUN, TRACED, BLOCKS = "one", "torch", "ring", "blocks"
RUNS = ("p2p", PEER_RUN, TRACED, ALONE, "a2a", "all_gather", BLOCKS)
KERNELS = {
    "chosen": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def model_flags(args: argparse.Namespace, sequence: int) -> list[str]:
    """What every run of ours trains."""
    shape = (
        f"--num-layers {args.layers} --hidden-size {args.hidden} --ffn-hidden-size {args.ffn} "
        f"--num-attention-heads {args.heads} --group-query-attention "
        f"--num-query-groups {args.groups} --seq-length {sequence} "
        f"--max-position-embeddings {sequence} --position-embedding-type rope "
        "--rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear "
        "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16 "
    )
    training = (
        f"--micro-batch-size 1 --global-batch-size 1 --train-iters {args.steps} --lr 1e-4 "
        "--clip-grad 1 --use-distributed-optimizer --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1 --mock-data --eval-iters 0 "
        f"--tokenizer-type NullTokenizer --vocab-size {args.vocabulary - 1} --log-interval 1 "
        "--num-workers 1"
    )
    return [*shape.split(), *training.split()]


def ours(args: argparse.Namespace, sequence: int, folder: Path, *more: str, nproc: int) -> Any:
    """Tokens a second and the peak of a rank's memory of one run, or why there are none."""
    name = f"{sequence} {' '.join(more) or 'one'}".replace("--", "").replace("/", "_")
    launch = Launch(
        name=name,
        flags=(*model_flags(args, sequence), *more),
        nproc=nproc,
        folder=folder,
        environ={},
        deadline=SECONDS,
    )
    return timed_run(launch, tokens=sequence)


def peer(args: argparse.Namespace, sequence: int, folder: Path) -> Any:
    sizes = ("layers", "hidden", "ffn", "heads", "groups", "vocabulary", "steps")
    words = [f"--sequence={sequence}", *(f"--{name}={getattr(args, name)}" for name in sizes)]
    return timed_peer(f"peer {sequence}", PEER, words, folder, nproc=2, tokens=sequence)


def overlap(args: argparse.Namespace, sequence: int, folder: Path) -> Any:
    """Of one step on a ring: seconds of transfers on the GPU, and of those beside computation."""
    run = partial(ours, args, sequence, folder, "--context-parallel-size", "2", nproc=2)
    return profiled_step(run, folder / "traces", step=2, read=hidden_transfers)


def hidden_transfers(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How much of the transfers' kernels lies beside kernels that compute, in a Chrome trace."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    transfers = [span(e) for e in kernels if "SendRecv" in e["name"]]
    computing = list(merged(span(e) for e in kernels if "nccl" not in e["name"]))
    hidden = sum(
        max(0.0, min(end, until) - max(begin, since))
        for begin, end in transfers
        for since, until in computing
    )
    total = sum(end - begin for begin, end in transfers)
    return {
        "transfers": len(transfers),
        "transfer_ms": round(total / 1e3, 3),
        "beside_computation_ms": round(hidden / 1e3, 3),
        "hidden": round(hidden / total, 4) if total else None,
        "computing_ms": round(sum(end - begin for begin, end in computing) / 1e3, 3),
    }


@dataclass(frozen=True)
class Place:
    """Stands in for a group of one of its ranks."""

    number: int
    ranks: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.ranks


def blocks(args: argparse.Namespace, sequence: int) -> dict[str, Any]:
    """Milliseconds of the attention of a layer, by kernel: the blocks of a ring of two, on one GPU.

    Of rank 0, whose two blocks have the work of rank 1's. `whole` is what one rank of `a2a` does.
    """
    rows, width = sequence // 2, args.hidden // args.heads

    def drawn(heads: int, length: int) -> torch.Tensor:
        drawn = torch.randn(length, 1, heads, width, device="cuda", dtype=torch.bfloat16)
        return drawn.permute(1, 2, 0, 3)

    query, grad = drawn(args.heads, rows), drawn(args.heads, rows)
    key, value = drawn(args.groups, rows), drawn(args.groups, rows)
    found: dict[str, Any] = {}
    for name, backend in KERNELS.items():
        with nullcontext() if backend is None else sdpa_kernel(backend):
            kernel = context_parallel.block_kernel(query, key, value, scale=None)
        if kernel is None:
            continue
        row = found[name] = {"kernel": type(kernel).__name__.strip("_"), "blocks": []}
        for step in range(2):
            block = context_parallel._ring_block(step, rows, Place(0, 2))  # type: ignore[arg-type]
            output, lse = torch.zeros_like(query), query.new_zeros(query.shape[:3]).float()
            forward = partial(kernel.forward, query, key, value, block)
            backward = partial(kernel.backward, grad, query, key, value, output, lse, block)
            row["blocks"].append([milliseconds(forward), milliseconds(backward)])
    query, key, value = (
        drawn(heads // 2, sequence).requires_grad_()
        for heads in (args.heads, args.groups, args.groups)
    )

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    forward_ms = milliseconds(attend)
    both_ms = milliseconds(lambda: attend().backward(torch.ones_like(query)))
    found["whole"] = [forward_ms, both_ms - forward_ms]
    return found


def milliseconds(function: Callable[[], Any], *, times: int = 5) -> float:
    """The median, by events on the GPU."""
    function()
    taken = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return round(statistics.median(taken), 3)


def span(event: dict[str, Any]) -> tuple[float, float]:
    """In microseconds."""
    return event["ts"], event["ts"] + event["dur"]


def merged(spans: Iterator[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The same times, without overlaps."""
    current: tuple[float, float] | None = None
    for begin, end in sorted(spans):
        if current is not None and begin <= current[1]:
            current = current[0], max(current[1], end)
            continue
        if current is not None:
            yield current
        current = begin, end
    if current is not None:
        yield current


def measure(args: argparse.Namespace) -> str:
    gpus = torch.cuda.device_count()
    needed = 1 if set(args.runs) <= {ALONE, BLOCKS} else 2
    if gpus < needed and not args.on_cpu:
        raise HeteroError(
            f"these runs need {counted(needed, 'GPU')}; --on-cpu tries the command on a small model"
        )
    record: dict[str, Any] = {
        "command": " ".join(["python bench/long_context.py", *args.typed]),
        "date": date.today().isoformat(),
        "hardware": f"{gpus}x {torch.cuda.get_device_name()}" if gpus else "CPU",
        "torch": torch.__version__,
        "model": {name: getattr(args, name) for name in ("layers", "hidden", "ffn", "vocabulary")},
        "sequences": {},
    }
    lines = []
    with tempfile.TemporaryDirectory() as name:
        for sequence in args.sequences:
            rows = record["sequences"].setdefault(str(sequence), {})
            for key, row in rows_of(args, sequence, Path(name)):
                rows[key] = row
                lines.append(f"{sequence} {key}: {json.dumps(row)[:240]}")
                args.out.write_text(json.dumps(record, indent=1) + "\n")
    return "\n".join([*lines, f"written: {args.out}"])


def rows_of(args: argparse.Namespace, sequence: int, folder: Path) -> Iterator[tuple[str, Any]]:
    """The runs of one length, by name."""
    for name in args.runs:
        if name in TYPES:
            flags = ("--context-parallel-size", "2", "--cp-comm-type", name)
            yield name, ours(args, sequence, folder, *flags, nproc=2)
        elif name == ALONE:
            yield name, ours(args, sequence, folder, nproc=1)
        elif name == BLOCKS and not args.on_cpu:
            yield name, blocks(args, sequence)
        elif not args.on_cpu:
            yield name, (peer if name == PEER_RUN else overlap)(args, sequence, folder)


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument(
        "--sequences",
        type=integer(1),
        nargs="+",
        default=[32768, 131072],
        help="tokens of a sequence",
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        choices=RUNS,
        default=list(RUNS),
        help="which runs of each length; default: all",
    )
    for name, value, what in (
        ("layers", 8, "number of layers"),
        ("hidden", 4096, "number of elements of a hidden state"),
        ("ffn", 14336, "number of elements inside the MLP"),
        ("heads", 32, "number of attention heads"),
        ("groups", 8, "number of query groups"),
        ("vocabulary", 32000, "number of tokens of the vocabulary"),
        ("steps", 6, "number of steps of each run, of which two warm up"),
    ):
        parser.add_argument(f"--{name}", type=integer(1), default=value, help=what)
    parser.add_argument("--on-cpu", action="store_true", help="without GPUs, and without peers")
    args = parser.parse_args(argv)
    args.typed = list(sys.argv[1:] if argv is None else argv)
    tool_command_line.require_results_file(args.out, "--out")
    return tool_command_line.run(lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
