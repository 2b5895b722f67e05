"""Measure pipelines whose two meshes differ in shape, beside homogeneous runs of either shape.

    python bench/bench_meshes.py --meshes TP2xDP1/TP1xDP2 --out runs/meshes-4
    python bench/bench_meshes.py --meshes TP4/TP2xDP2 DP4/TP2xDP2 --out runs/meshes-8
    python bench/bench_meshes.py --meshes DP4xEP4/DP4xEP2 --out runs/experts-8 \
        --model examples/presets/qwen3_30b_a3b.yaml -- --num-layers 24
    python bench/bench_meshes.py --meshes CP4/CP2xDP2 --seq-length 131072 --out runs/long-8 \
        -- --max-position-embeddings 131072

Every line is a run of pretrain_gpt.py on the same model, data, split and global batch. Throughput
is compared with what the same FLOP/s per GPU as in the homogeneous runs would give, bytes over the
boundary with the size of the tensors, and losses with theirs. One machine plays both vendors
(simulated). --micro-batch-size is of the mesh with the most replicas; a replica of the other has as
many times more. The folder holds meshes.json and meshes.md, written anew after every run; --resume
goes on from them. What follows `--` goes to all runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

from bench.reproduction.measurement import Attempt
from bench.reproduction.mesh_runs import (
    MeshOptions,
    findings,
    parse_pair,
    planned_runs,
    render,
)
from bench.reproduction.run_options import (
    add_run_flags,
    parse_words,
    parsed,
    possible_here,
    require_gpus,
    without_false_comparison,
)
from bench.reproduction.training_runs import device_of, record_of, run_all
from hetero.link import TRANSPORTS
from hetero.tools import tool_command_line
from hetero.tools.reports.page import write_whole


def parse_options(argv: Sequence[str]) -> MeshOptions:
    """Read the command line. Raises UserError, or exits with 2 and one sentence."""
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--meshes",
        type=parse_pair,
        nargs="+",
        required=True,
        metavar="FIRST/LAST",
        help="tensor-, context-, data- and expert-parallel sizes of both stages, as in "
        "TP2/CP2xDP2 or DP4xEP4/DP4xEP2",
    )
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=TRANSPORTS,
        default=possible_here(("device-direct", "cpu-forward")),
        metavar="NAME",
        help=f"between the meshes: {', '.join(TRANSPORTS)}",
    )
    add_run_flags(parser, iterations=6, warmup=3)
    given, shared = parse_words(parser, argv)
    options = MeshOptions(
        **shared,
        pairs=tuple(dict.fromkeys(given.meshes)),
        transports=tuple(dict.fromkeys(given.transports)),
    )
    if options.micro_batch_size is None:
        preset = parsed(options, (), nproc=1)
        options = replace(options, micro_batch_size=preset.micro_batch_size)
    for pair in options.pairs:
        require_gpus(pair.ranks, flag=f"--meshes {pair.text}")
    for run in planned_runs(options):
        parsed(options, run.flags, nproc=run.nproc)
    return without_false_comparison(options)


def write_results(options: MeshOptions, attempts: Sequence[Attempt], command: Sequence[str]) -> str:
    """Write both files anew. Returns the text of meshes.md."""
    runs = planned_runs(options)
    found = findings(options, attempts)
    args = parsed(options, runs[0].flags, nproc=runs[0].nproc)
    title = (
        f"{options.setting.name} on {device_of(attempts)}s of one machine, "
        f"sequence {args.seq_length}, global batch {args.global_batch_size}, vendors simulated"
    )
    lines = [
        f"tokens/s: median of iterations {options.warmup + 1} to {options.iterations}; predicted: "
        "the sum over all GPUs of what a GPU does in the homogeneous run of its mesh's shape",
        "the slower shape: as many GPUs, all in the shape whose homogeneous run is slower; layers "
        "that are not shared out by speed allow no more",
        "of the tensors: bytes over the boundary over those of activations and gradients, each "
        "element counted once",
        "losses: the largest relative difference of any iteration",
        *(f"{one.row}: {one.problem}" for one in attempts if one.problem),
    ]
    record = {
        **record_of(options, runs, attempts, command),
        "summary": title,
        "layers": options.layers,
        "notes": lines,
        "findings": [one.as_json() for one in found],
    }
    text = f"{title}\n\n{render(found)}\n\n" + "".join(f"- {line}\n" for line in lines)
    write_whole(options.out / "meshes.json", json.dumps(record, indent=1) + "\n")
    write_whole(options.out / "meshes.md", text)
    return text


def bench(argv: Sequence[str]) -> str:
    """Make all runs. Returns the line for the end."""
    options = parse_options(argv)
    command = ("bench/bench_meshes.py", *argv)
    run_all(
        options,
        planned_runs(options),
        results=options.out / "meshes.json",
        write=lambda attempts: write_results(options, attempts, command),
    )
    return f"written: meshes.json and meshes.md in {options.out}"


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return tool_command_line.run(lambda: bench(words))


if __name__ == "__main__":
    sys.exit(main())
