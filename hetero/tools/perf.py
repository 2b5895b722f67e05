"""Measure links and collectives beside the libraries and the bare paths that bound them.

    hetero perf links --out runs/links                    # CPU tensors, or two GPUs
    hetero perf links --transports shm gloo --sizes 8M 32M
    hetero perf collectives --ranks 2+2 --device cpu --sizes 64K 1M 64M
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
from collections.abc import Iterator, Sequence
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero import cli

    sys.exit(cli.main(["perf", *sys.argv[1:]]))

import torch
import torch.distributed as dist

from hetero.errors import Faults, HeteroError, UserError
from hetero.link import FAMILIES, TRANSPORTS
from hetero.link.ring import PAGE
from hetero.native.binding import ENGINE_RAILS
from hetero.plan import VENDOR_VARIABLE, VENDORS
from hetero.startup.addresses import lead_gloo_towards
from hetero.text import integer, number, seconds
from hetero.tools.benchmark import record
from hetero.tools.benchmark.collective import DTYPES, OPERATIONS, REDUCTIONS
from hetero.tools.benchmark.program import BACKENDS, run_rank
from hetero.tools.benchmark.record import CollectiveOptions, LinkOptions
from hetero.tools.benchmark.report import write_report
from hetero.tools.launching.spawned_ranks import run_ranks
from hetero.tools.tool_command_line import Parser, make_results_folder, require_writable, run

_MEASURED = (*TRANSPORTS, "nccl")
"""The transports of a boundary and, beside them, what a mesh of GPUs uses within itself."""
_MOST_RANKS = 1024
"""Of one machine."""
_UNITS = {"K": record.KIB, "M": record.MIB, "G": record.GIB}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options, out = parse_options(argv)
    return run(lambda: measure(options, out, ["hetero", "perf", *argv]))


def parse_options(argv: Sequence[str]) -> tuple[LinkOptions | CollectiveOptions, str]:
    """The options and the folder for the results. Exits with 2 and a sentence on bad input."""
    parser = Parser((__doc__ or "").partition("\n")[0])
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="links|collectives")
    links = subjects.add_parser(
        "links", description="Measure links between two processes, over every transport."
    )
    collectives = subjects.add_parser(
        "collectives", description="Measure collectives of `hetero` beside gloo, NCCL and FlagCX."
    )
    _add_link_flags(links)
    _add_collective_flags(collectives)
    _add_common_flags(links, LinkOptions(), "runs/links")
    _add_common_flags(collectives, CollectiveOptions(), "runs/collectives")
    given = parser.parse_args(argv)
    kind = LinkOptions if given.subject == "links" else CollectiveOptions
    for name, value in vars(given).items():
        if isinstance(value, list):
            setattr(given, name, tuple(dict.fromkeys(value)))
    given.sizes = tuple(sorted(given.sizes))
    if given.subject == "collectives":
        if given.parts and _under_launcher():
            collectives.error(
                "--ranks is for ranks that this tool starts, and a launcher has started these"
            )
        given.parts = given.parts or CollectiveOptions.parts
    options = kind(**{field.name: getattr(given, field.name) for field in fields(kind)})
    if isinstance(options, LinkOptions):
        if problems := list(_link_problems(options)):
            links.refuse(problems)
    elif options.reduction == "avg" and "int" in options.dtype:
        collectives.error(
            f"--reduction avg of {options.dtype} would be cut off; give a floating dtype"
        )
    return options, given.out


def _link_problems(options: LinkOptions) -> Iterator[str]:
    if options.ring_bytes < 2 * PAGE:
        yield f"--ring {options.ring_bytes} is smaller than two pages, {2 * PAGE} bytes"
    if options.chunk_bytes is not None and options.chunk_bytes > options.ring_bytes:
        yield f"--chunk {options.chunk_bytes} is larger than --ring {options.ring_bytes}"
    if _under_launcher():
        yield "links starts its two processes itself; start it without a launcher"


def _add_common_flags(
    parser: Parser, default: LinkOptions | CollectiveOptions, results: str
) -> None:
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=_size,
        default=list(default.sizes),
        metavar="SIZE",
        help="bytes of a message or of a collective's buffer, as in 64K, 32M or 1G",
    )
    # Two processes share no GPU; ranks that simulate vendors may.
    has_gpus = torch.cuda.device_count() >= (2 if isinstance(default, LinkOptions) else 1)
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda" if has_gpus else "cpu",
        help="where the tensors lie: cuda is a GPU of any vendor",
    )
    parser.add_argument(
        "--seconds-a-point",
        type=number(above=0),
        default=default.seconds_a_point,
        help="seconds for one row at one size; a few samples are taken whatever it is",
    )
    parser.add_argument(
        "--repeats", type=integer(1), default=default.repeats, help="samples of a figure, at most"
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=default.timeout,
        help="seconds before a blocked transfer is an error",
    )
    parser.add_argument("--out", default=results, help="folder for the results")


def _add_link_flags(parser: Parser) -> None:
    default = LinkOptions
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=_MEASURED,
        default=[name for name in _MEASURED if name not in FAMILIES],
        metavar="NAME",
        help=f"of {', '.join(_MEASURED)}; one that cannot run here is left out with a line",
    )
    parser.add_argument(
        "--ring",
        dest="ring_bytes",
        type=_size,
        default=default.ring_bytes,
        metavar="SIZE",
        help="bytes of a link's rings",
    )
    parser.add_argument(
        "--chunk",
        dest="chunk_bytes",
        type=_size,
        metavar="SIZE",
        help="bytes of a slot; default: what suits each transport",
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
    parser.add_argument("--keep-threads", action="store_true", help="leave torch its threads")


def _add_collective_flags(parser: Parser) -> None:
    default = CollectiveOptions
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=BACKENDS,
        default=list(default.backends),
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
        dest="parts",
        type=_parts,
        metavar="PARTS",
        help="ranks of each simulated vendor, as in 2+2 (default: 1+1); one number for ranks of "
        "the vendor that is there; not under a launcher",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default=default.dtype, help="of the tensors' elements"
    )
    parser.add_argument(
        "--reduction",
        choices=REDUCTIONS,
        default=default.reduction,
        help="of all_reduce and reduce_scatter",
    )


def _size(text: str) -> int:
    """Bytes from 4096, 64K, 32M or 1G."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not (digits.isascii() and digits.isdecimal()) or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 4096, 64K, 32M or 1G")
    return int(digits) * unit


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


def measure(options: LinkOptions | CollectiveOptions, out: str, command: Sequence[str]) -> str:
    """Measure and write. HeteroError for results that are wrong and for what broke."""
    parts = options.parts if isinstance(options, CollectiveOptions) else (2,)
    local_size, simulated = sum(parts), len(parts) > 1
    if _under_launcher():
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        simulated = VENDOR_VARIABLE in os.environ
    faults = Faults()
    faults.read(lambda: _require_gpus(options, local_size, simulated=simulated))
    faults.read(lambda: require_writable(Path(out), f"--out {out}"))
    faults.refuse()
    folder = make_results_folder(out)
    if _under_launcher():
        lead_gloo_towards(os.environ.get("MASTER_ADDR", ""))
        store, rank, size = next(iter(dist.rendezvous("env://")))
        failed = _run_rank(rank, size, store, options=options, out=out, command=command)
    else:
        store = dist.TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=options.timeout),
        )
        run_ranks(run_started_rank, (parts, store.port, options, out, command), ranks=sum(parts))
        failed = json.loads((folder / record.FILE).read_text())["failed"]
    if failed:
        raise HeteroError(f"wrong or broken: {', '.join(failed)}; see above")
    return ""


def run_started_rank(
    rank: int,
    parts: Sequence[int],
    port: int,
    options: LinkOptions | CollectiveOptions,
    out: str,
    command: Sequence[str],
) -> None:
    """A rank that the tool has started itself, on this host."""
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if len(parts) > 1:
        vendors = (f"{name}*{count}" for name, count in zip(VENDORS, parts, strict=False))
        os.environ[VENDOR_VARIABLE] = ",".join(vendors)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=options.timeout))
    _run_rank(rank, sum(parts), store, options=options, out=out, command=command)


def _run_rank(
    rank: int,
    size: int,
    store: dist.Store,
    *,
    options: LinkOptions | CollectiveOptions,
    out: str,
    command: Sequence[str],
) -> list[str]:
    """What failed. Rank 0 writes the report."""
    found = run_rank(rank, size, store, options=options, command=command)
    if rank == 0:
        write_report(found, Path(out))
    return found.failed


def _require_gpus(options: LinkOptions | CollectiveOptions, ranks: int, *, simulated: bool) -> None:
    """Refuse more ranks than GPUs. Ranks that simulate vendors may share one."""
    gpus = torch.cuda.device_count()
    if options.device == "cuda" and gpus < (1 if simulated else ranks):
        raise UserError(
            f"every rank needs a GPU: {ranks} in all, and this host has {gpus}; "
            "start fewer, or give --device cpu"
        )
