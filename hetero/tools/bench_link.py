"""Measure the links between two processes of this machine, over every transport that runs here.

    python tools/bench_link.py --out runs/links                    # CPU tensors, or two GPUs
    python tools/bench_link.py --transports shm gloo --sizes 8M 32M

Each transport stands beside the bare path that bounds it: a copy, a TCP socket, ib_write_bw. All
are measured at one size before the next, so that ratios come from one stretch of time, and every
byte is compared. docs/benchmarks/links.md says what each figure is.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero.tools.tool_command_line import begin_script

    begin_script(core=False)

from hetero.converters import integer, number
from hetero.errors import HeteroError
from hetero.link.names import FAMILIES, TRANSPORTS
from hetero.native.headers import constant
from hetero.tools.launching.spawned_ranks import run_ranks
from hetero.tools.link_bench.bench_rank import run_rank
from hetero.tools.link_bench.bench_record import DEFAULT_SIZES, Options, parse_size
from hetero.tools.tool_command_line import (
    Parser,
    add_timing_flags,
    make_results_folder,
    run,
)


def parse_options(argv: Sequence[str]) -> tuple[Options, str]:
    """The options and the folder for the results. Exits with 2 and a sentence on bad input."""
    parser = Parser((__doc__ or "").partition("\n")[0])
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
    add_timing_flags(
        parser,
        seconds_a_point=Options.seconds_a_point,
        repeats=Options.repeats,
        timeout=Options.timeout,
    )
    parser.add_argument(
        "--ring", type=parse_size, default=Options.ring_bytes, help="bytes of a link's rings"
    )
    parser.add_argument(
        "--chunk", type=parse_size, help="bytes of a slot; left out: what suits each transport"
    )
    parser.add_argument(
        "--connections",
        type=integer(1, maximum=constant("ENGINE_RAILS")),
        default=Options.connections,
        help="TCP connections in each direction, of tcp and of the bare sockets",
    )
    parser.add_argument(
        "--idle-seconds",
        type=number(above=0),
        default=Options.idle_seconds,
        help="seconds for which the open links are watched while nothing is sent",
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


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options, out = parse_options(argv)
    command = ["python", "tools/bench_link.py", *argv]
    return run(lambda: measure(options, out, command))


def measure(options: Options, out: str, command: Sequence[str]) -> str:
    """Measure and write; the process that leads says where. HeteroError for a link that broke."""
    folder = make_results_folder(out)
    with tempfile.TemporaryDirectory() as store_folder:
        run_ranks(run_rank, (options, store_folder, out, command), ranks=2)
    failed = json.loads((folder / "links.json").read_text())["failed"]
    if failed:
        raise HeteroError(f"broke while it was measured: {', '.join(failed)}; see above")
    return ""


if __name__ == "__main__":
    sys.exit(main())
