"""Measure the links between two processes of this machine, over every transport that runs here.

    python tools/bench_link.py --out runs/links                    # CPU tensors, or two GPUs
    python tools/bench_link.py --transports shm gloo --sizes 8M 32M

Each transport stands beside the bare path that bounds it: a copy, a TCP socket, ib_write_bw. All
are measured at one size before the next, so that ratios come from one stretch of time, and every
byte is compared. docs/benchmarks/links.md says what each figure is.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tools.tool_command_line import begin_script

    begin_script(core=False)

import torch
from torch.multiprocessing.spawn import ProcessException, ProcessRaisedException

from hetero.errors import HeteroError
from hetero.interrupts import children_ignore_interrupts
from hetero.link.names import FAMILIES, TRANSPORTS
from tools.launching.processes import end_family
from tools.link_bench.bench_rank import run_rank
from tools.link_bench.bench_record import DEFAULT_SIZES, Options, parse_size
from tools.tool_command_line import Parser, make_results_folder, run


def parse_options(argv: Sequence[str]) -> tuple[Options, str]:
    """The options and the folder for the results. Exits with 2 and a sentence on bad input."""
    parser = Parser((__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=TRANSPORTS,
        default=[name for name in TRANSPORTS if name not in FAMILIES],
        metavar="NAME",
        help=f"of {', '.join(TRANSPORTS)}; one that cannot run here is left out with a line",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=parse_size,
        default=list(DEFAULT_SIZES),
        metavar="SIZE",
        help="bytes of a message, as in 64K, 32M or 1G",
    )
    parser.add_argument(
        "--seconds-a-point",
        type=_positive,
        default=Options.seconds_a_point,
        help="seconds for one transport at one size; a few samples are taken whatever it is",
    )
    parser.add_argument(
        "--repeats", type=_count, default=Options.repeats, help="samples of a figure, at most"
    )
    parser.add_argument(
        "--ring", type=parse_size, default=Options.ring_bytes, help="bytes of a link's rings"
    )
    parser.add_argument(
        "--chunk", type=parse_size, help="bytes of a slot; left out: what suits each transport"
    )
    parser.add_argument(
        "--connections",
        type=_count,
        default=Options.connections,
        help="TCP connections in each direction, of tcp and of the bare sockets",
    )
    parser.add_argument(
        "--idle-seconds",
        type=_positive,
        default=Options.idle_seconds,
        help="seconds for which the open links are watched while nothing is sent",
    )
    parser.add_argument(
        "--timeout",
        type=_positive,
        default=Options.timeout,
        help="seconds before a blocked transfer is an error",
    )
    parser.add_argument("--cpu", action="store_true", help="CPU tensors even where there are GPUs")
    parser.add_argument("--keep-threads", action="store_true", help="leave torch its threads")
    parser.add_argument("--out", default="runs/links", help="folder for the results")
    given = parser.parse_args(argv)
    if given.chunk is not None and given.chunk > given.ring:
        parser.error(f"--chunk {given.chunk} is larger than --ring {given.ring}")
    options = Options(
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
    return options, given.out


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options, out = parse_options(argv)
    command = ["python", "tools/bench_link.py", *argv]
    return run(lambda: measure(options, out, command))


def measure(options: Options, out: str, command: Sequence[str]) -> str:
    """Measure and write; the process that leads says where. HeteroError for a link that broke."""
    folder = make_results_folder(out)
    with tempfile.TemporaryDirectory() as store_folder:
        _run_both(options, store_folder, out, command)
    failed = json.loads((folder / "links.json").read_text())["failed"]
    if failed:
        raise HeteroError(f"broke while it was measured: {', '.join(failed)}; see above")
    return ""


def _run_both(options: Options, store_folder: str, out: str, command: Sequence[str]) -> None:
    try:
        with children_ignore_interrupts():
            processes = torch.multiprocessing.spawn(
                run_rank, args=(options, store_folder, out, command), nprocs=2, join=False
            )
        while not processes.join():
            pass
    except ProcessRaisedException as error:
        # The last line of a process's traceback is its error.
        raise HeteroError(
            f"rank {error.error_index}: {error.msg.strip().splitlines()[-1]}"
        ) from error
    except ProcessException as error:
        raise HeteroError(f"rank {error.error_index} ended: {error.msg}") from error
    finally:
        # Asked of Python: an interrupt that came while they were started has left no `processes`.
        for process in multiprocessing.active_children():
            if process.pid is not None:
                end_family(process.pid)


if __name__ == "__main__":
    sys.exit(main())
