"""Measure links and collectives beside the libraries and the bare paths that bound them.

    hetero perf links --out runs/links                    # CPU tensors, or two GPUs
    hetero perf links --transports shm gloo --sizes 8M 32M
    hetero perf collectives --ranks 2+2 --device cpu --max-size 64M
    torchrun --nnodes 2 --nproc-per-node 8 ... -m hetero perf collectives

All transports and backends are measured at one size before the next, so that ratios come from one
stretch of time, and every element is compared. `links` starts two processes. `collectives` started
by itself plays vendors on this host (simulated); a launcher's ranks are what they are.
docs/benchmarks/links.md and docs/benchmarks/collectives.md say what each figure is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero import cli

    sys.exit(cli.main(["perf", *sys.argv[1:]]))

import torch
import torch.distributed as dist

from hetero.errors import HeteroError, UserError
from hetero.link import FAMILIES, TRANSPORTS
from hetero.native.binding import ENGINE_RAILS
from hetero.plan import VENDOR_VARIABLE, VENDORS
from hetero.startup.addresses import lead_gloo_towards
from hetero.text import integer, number
from hetero.tools.collective_bench import collective_record
from hetero.tools.collective_bench.collective_files import RESULTS
from hetero.tools.collective_bench.collective_rank import run_rank as run_collective_rank
from hetero.tools.collective_bench.collective_rank import run_started_rank
from hetero.tools.launching.spawned_ranks import run_ranks
from hetero.tools.link_bench import bench_record
from hetero.tools.link_bench.bench_rank import run_rank as run_link_rank
from hetero.tools.link_bench.bench_record import parse_size
from hetero.tools.tool_command_line import (
    Parser,
    add_timing_flags,
    make_results_folder,
    run,
)

_MEASURED = (*TRANSPORTS, "nccl")
"""The transports of a boundary and, beside them, what a mesh of GPUs uses within itself."""
_MOST_RANKS = 1024
"""Of one machine."""


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options, out = parse_options(argv)
    command = ["hetero", "perf", *argv]
    if isinstance(options, bench_record.Options):
        return run(lambda: measure_links(options, out, command))
    return run(lambda: measure_collectives(options, out, command))


def parse_options(
    argv: Sequence[str],
) -> tuple[bench_record.Options | collective_record.Options, str]:
    """The options and the folder for the results. Exits with 2 and a sentence on bad input."""
    parser = Parser((__doc__ or "").partition("\n")[0])
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="links|collectives")
    links = subjects.add_parser(
        "links", description="Measure links between two processes, over every transport."
    )
    _add_link_flags(links)
    collectives = subjects.add_parser(
        "collectives", description="Measure collectives of `hetero` beside gloo, NCCL and FlagCX."
    )
    _add_collective_flags(collectives)
    given = parser.parse_args(argv)
    if given.subject == "links":
        return _link_options(given, links), given.out
    return _collective_options(given, collectives), given.out


def _add_link_flags(parser: Parser) -> None:
    default = bench_record.Options
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=_MEASURED,
        default=[name for name in _MEASURED if name not in FAMILIES],
        metavar="NAME",
        help=f"of {', '.join(_MEASURED)}; one that cannot run here is left out with a line",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=parse_size,
        default=list(bench_record.DEFAULT_SIZES),
        metavar="SIZE",
        help="bytes of a message, as in 64K, 32M or 1G",
    )
    add_timing_flags(
        parser,
        seconds_a_point=default.seconds_a_point,
        repeats=default.repeats,
        timeout=default.timeout,
    )
    parser.add_argument(
        "--ring", type=parse_size, default=default.ring_bytes, help="bytes of a link's rings"
    )
    parser.add_argument(
        "--chunk", type=parse_size, help="bytes of a slot; default: what suits each transport"
    )
    parser.add_argument(
        "--connections",
        type=integer(1, maximum=ENGINE_RAILS),
        default=default.connections,
        help="TCP connections in each direction, of tcp and of the bare sockets",
    )
    parser.add_argument(
        "--idle-seconds",
        type=number(above=0),
        default=default.idle_seconds,
        help="seconds for which the open links are watched while nothing is sent",
    )
    parser.add_argument("--cpu", action="store_true", help="CPU tensors even where there are GPUs")
    parser.add_argument("--keep-threads", action="store_true", help="leave torch its threads")
    parser.add_argument("--out", default="runs/links", help="folder for the results")


def _link_options(given: argparse.Namespace, parser: Parser) -> bench_record.Options:
    if given.chunk is not None and given.chunk > given.ring:
        parser.error(f"--chunk {given.chunk} is larger than --ring {given.ring}")
    return bench_record.Options(
        transports=tuple(dict.fromkeys(given.transports)),
        sizes=tuple(sorted(set(given.sizes))),
        seconds_a_point=given.seconds_a_point,
        repeats=given.repeats,
        ring_bytes=given.ring,
        chunk_bytes=given.chunk,
        connections=given.connections,
        idle_seconds=given.idle_seconds,
        timeout=given.timeout,
        on_cpu=given.cpu,
        keep_threads=given.keep_threads,
    )


def measure_links(options: bench_record.Options, out: str, command: Sequence[str]) -> str:
    """Measure and write; the process that leads says where. HeteroError for a link that broke."""
    folder = make_results_folder(out)
    with tempfile.TemporaryDirectory() as store_folder:
        run_ranks(run_link_rank, (options, store_folder, out, command), ranks=2)
    failed = json.loads((folder / "links.json").read_text())["failed"]
    if failed:
        raise HeteroError(f"broke while it was measured: {', '.join(failed)}; see above")
    return ""


def _add_collective_flags(parser: Parser) -> None:
    default = collective_record.Options
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=collective_record.BACKENDS,
        default=list(default.backends),
        metavar="NAME",
        help=f"of {', '.join(collective_record.BACKENDS)}; one that cannot run here is left out "
        "with a line",
    )
    parser.add_argument(
        "--operations",
        nargs="+",
        choices=collective_record.OPERATIONS,
        default=list(collective_record.OPERATIONS),
        metavar="NAME",
        help=f"of {', '.join(collective_record.OPERATIONS)}; send_recv is each rank to the next",
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
        default=default.smallest,
        metavar="SIZE",
        help="bytes, as in 4K",
    )
    parser.add_argument(
        "--max-size",
        type=parse_size,
        default=default.largest,
        metavar="SIZE",
        help="bytes, as in 1G",
    )
    parser.add_argument(
        "--factor", type=integer(1), default=default.factor, help="from one size to the next"
    )
    parser.add_argument(
        "--dtype",
        choices=collective_record.DTYPES,
        default=default.dtype,
        help="of the tensors' elements",
    )
    parser.add_argument(
        "--reduction",
        choices=collective_record.REDUCTIONS,
        default=default.reduction,
        help="of all_reduce and reduce_scatter",
    )
    add_timing_flags(
        parser,
        seconds_a_point=default.seconds_a_point,
        repeats=default.repeats,
        timeout=default.timeout,
    )
    parser.add_argument("--out", default="runs/collectives", help="folder for the results")


def _collective_options(given: argparse.Namespace, parser: Parser) -> collective_record.Options:
    if given.min_size > given.max_size:
        parser.error(f"--min-size {given.min_size} is larger than --max-size {given.max_size}")
    if given.factor == 1:
        parser.error("--factor 1 leads to no other size; give 2 or more")
    if given.ranks is not None and _under_launcher():
        parser.error("--ranks is for ranks that this tool starts, and a launcher has started these")
    if given.reduction == "avg" and "int" in given.dtype:
        parser.error(f"--reduction avg of {given.dtype} would be cut off; give a floating dtype")
    return collective_record.Options(
        backends=tuple(dict.fromkeys(given.backends)),
        operations=tuple(dict.fromkeys(given.operations)),
        parts=given.ranks or collective_record.Options.parts,
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


def measure_collectives(
    options: collective_record.Options, out: str, command: Sequence[str]
) -> str:
    """Measure and write. HeteroError for results that are wrong and for what broke."""
    folder = make_results_folder(out)
    if _under_launcher():
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        _require_gpus(options, local_size, simulated=VENDOR_VARIABLE in os.environ)
        lead_gloo_towards(os.environ.get("MASTER_ADDR", ""))
        store, rank, size = next(iter(dist.rendezvous("env://")))
        failed = run_collective_rank(
            store, rank=rank, size=size, options=options, out=out, command=command
        )
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


def _require_gpus(options: collective_record.Options, ranks: int, *, simulated: bool) -> None:
    """Refuse more ranks than GPUs. Ranks that simulate vendors may share one."""
    gpus = torch.cuda.device_count()
    if options.device == "cuda" and gpus < (1 if simulated else ranks):
        raise UserError(
            f"every rank needs a GPU: {ranks} in all, and this host has {gpus}; "
            "start fewer, or give --device cpu"
        )
