"""Measure collectives of `hetero` beside gloo, NCCL and FlagCX, in the manner of nccl-tests.

    python tools/bench_collectives.py --ranks 2+2 --device cpu --max-size 64M
    torchrun --nnodes 2 --nproc-per-node 8 ... tools/bench_collectives.py

Every backend is measured at one size before the next, so that ratios come from one stretch of time,
and every element is compared. Started by itself the tool plays vendors on this host (simulated);
a launcher's ranks are what they are. docs/benchmarks/collectives.md says what each figure is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero.tools.tool_command_line import begin_script

    begin_script(core=False)

import torch
import torch.distributed as dist

from hetero.addresses import lead_gloo_towards
from hetero.cluster import VENDOR_VARIABLE
from hetero.converters import integer
from hetero.errors import HeteroError, UserError
from hetero.plan import VENDORS
from hetero.tools.collective_bench.collective_files import RESULTS
from hetero.tools.collective_bench.collective_rank import run_rank, run_started_rank
from hetero.tools.collective_bench.collective_record import (
    BACKENDS,
    DTYPES,
    OPERATIONS,
    REDUCTIONS,
    Options,
)
from hetero.tools.launching.spawned_ranks import run_ranks
from hetero.tools.link_bench.bench_record import parse_size
from hetero.tools.tool_command_line import (
    Parser,
    add_timing_flags,
    make_results_folder,
    run,
)

_MOST_RANKS = 1024
"""Of one machine."""


def parse_options(argv: Sequence[str]) -> tuple[Options, str]:
    """The options and the folder for the results. Exits with 2 and a sentence on bad input."""
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=BACKENDS,
        default=list(Options.backends),
        metavar="NAME",
        help=f"of {', '.join(BACKENDS)}; one that cannot run here is left out with a line",
    )
    parser.add_argument(
        "--operations",
        nargs="+",
        choices=OPERATIONS,
        default=list(OPERATIONS),
        metavar="NAME",
        help=f"of {', '.join(OPERATIONS)}; send_recv is each rank to the next",
    )
    parser.add_argument(
        "--ranks",
        type=_parts,
        metavar="PARTS",
        help="ranks of each simulated vendor, as in 2+2 (default: 1+1); one number for ranks of "
        "the vendor that is there; not under a launcher",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where the tensors lie: cuda is a GPU of any vendor",
    )
    parser.add_argument(
        "--min-size",
        type=parse_size,
        default=Options.smallest,
        metavar="SIZE",
        help="bytes, as in 4K",
    )
    parser.add_argument(
        "--max-size",
        type=parse_size,
        default=Options.largest,
        metavar="SIZE",
        help="bytes, as in 1G",
    )
    parser.add_argument(
        "--factor", type=integer(1), default=Options.factor, help="from one size to the next"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default=Options.dtype, help="of the tensors' elements"
    )
    parser.add_argument(
        "--reduction",
        choices=REDUCTIONS,
        default=Options.reduction,
        help="of all_reduce and reduce_scatter",
    )
    add_timing_flags(
        parser,
        seconds_a_point=Options.seconds_a_point,
        repeats=Options.repeats,
        timeout=Options.timeout,
    )
    parser.add_argument("--out", default="runs/collectives", help="folder for the results")
    given = parser.parse_args(argv)
    if given.min_size > given.max_size:
        parser.error(f"--min-size {given.min_size} is larger than --max-size {given.max_size}")
    if given.factor == 1:
        parser.error("--factor 1 leads to no other size; give 2 or more")
    if given.ranks is not None and _under_launcher():
        parser.error("--ranks is for ranks that this tool starts, and a launcher has started these")
    if given.reduction == "avg" and "int" in given.dtype:
        parser.error(f"--reduction avg of {given.dtype} would be cut off; give a floating dtype")
    options = Options(
        backends=tuple(dict.fromkeys(given.backends)),
        operations=tuple(dict.fromkeys(given.operations)),
        parts=given.ranks or Options.parts,
        device=given.device,
        smallest=given.min_size,
        largest=given.max_size,
        factor=given.factor,
        dtype=given.dtype,
        reduction=given.reduction,
        seconds_a_point=given.seconds_a_point,
        repeats=given.repeats,
        timeout=given.timeout,
    )
    return options, given.out


def _parts(text: str) -> tuple[int, ...]:
    words = text.split("+")
    parts = tuple(int(word) for word in words if word.isascii() and word.isdecimal())
    is_sum = len(parts) == len(words) <= len(VENDORS) and 0 not in parts
    if not is_sum or not 2 <= sum(parts) <= _MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not 2 ranks or more, up to {_MOST_RANKS}, of at most {len(VENDORS)} "
            "vendors; write 4 or 2+2"
        )
    return parts


def _under_launcher() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options, out = parse_options(argv)
    command = ["python", "tools/bench_collectives.py", *argv]
    return run(lambda: measure(options, out, command))


def measure(options: Options, out: str, command: Sequence[str]) -> str:
    """Measure and write. HeteroError for results that are wrong and for what broke."""
    folder = make_results_folder(out)
    if _under_launcher():
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        _require_gpus(options, local_size, simulated=VENDOR_VARIABLE in os.environ)
        lead_gloo_towards(os.environ.get("MASTER_ADDR", ""))
        store, rank, size = next(iter(dist.rendezvous("env://")))
        failed = run_rank(store, rank=rank, size=size, options=options, out=out, command=command)
    else:
        _require_gpus(options, sum(options.parts), simulated=len(options.parts) > 1)
        store = dist.TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=options.timeout),
        )
        arguments = (options, _vendors_of(options.parts), store.port, out, command)
        run_ranks(run_started_rank, arguments, ranks=sum(options.parts))
        failed = json.loads((folder / RESULTS).read_text())["failed"]
    if failed:
        raise HeteroError(f"wrong or broken: {', '.join(failed)}; see above")
    return ""


def _vendors_of(parts: Sequence[int]) -> str:
    """What HETERO_VENDOR says; nothing where no vendor is played."""
    if len(parts) == 1:
        return ""
    return ",".join(f"{vendor}*{count}" for vendor, count in zip(VENDORS, parts, strict=False))


def _require_gpus(options: Options, ranks: int, *, simulated: bool) -> None:
    """Refuse more ranks than GPUs. Ranks that simulate vendors may share one."""
    gpus = torch.cuda.device_count()
    if options.device == "cuda" and gpus < (1 if simulated else ranks):
        raise UserError(
            f"every rank needs a GPU: {ranks} in all, and this host has {gpus}; "
            "start fewer, or give --device cpu"
        )


if __name__ == "__main__":
    sys.exit(main())
