"""The command line of bench/reproduce_table.py, and what is refused before any row starts."""

from __future__ import annotations

from collections.abc import Sequence

from bench.reproduction.run_options import (
    add_run_flags,
    parse_words,
    possible_here,
    require_gpus,
    without_false_comparison,
)
from bench.reproduction.settings import EVERY_GROUP, HOMOGENEOUS, ROWS, VENDORS
from bench.reproduction.table_rows import Options, parsed_row
from hetero.errors import UserError
from hetero.link import TRANSPORTS
from hetero.text import integer
from hetero.tools import tool_command_line


def parse_options(argv: Sequence[str], *, description: str) -> Options:
    """Read the command line. Exits with 2 and one sentence on bad input, as does what it calls."""
    given, shared = parse_words(_parser(description), argv)
    options = Options(
        **shared, nproc=given.nproc, rows=tuple(dict.fromkeys(given.rows)), rounds=given.rounds
    )
    _check(options)
    return without_false_comparison(options)


def _parser(description: str) -> tool_command_line.Parser:
    parser = tool_command_line.Parser(description)
    parser.add_argument(
        "--nproc",
        type=integer(1),
        default=2,
        help="GPUs (processes, on CPU): two stages",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        default=possible_here(ROWS),
        choices=(HOMOGENEOUS, *TRANSPORTS, EVERY_GROUP),
        metavar="ROW",
        help=f"{HOMOGENEOUS}, or a transport: {', '.join(TRANSPORTS)}; {EVERY_GROUP}: gloo, with "
        "--distributed-backend gloo",
    )
    parser.add_argument(
        "--rounds",
        type=integer(1),
        default=1,
        help="times every row runs; every second round backwards",
    )
    add_run_flags(parser, iterations=6, warmup=3)
    return parser


def _check(options: Options) -> None:
    """Refuse what no row could run with, before the first one starts."""
    stages = len(VENDORS)
    if options.nproc < stages or options.nproc % stages:
        raise UserError(
            f"--nproc {options.nproc} cannot be shared by {stages} pipeline stages; give a "
            f"multiple of {stages}"
        )
    require_gpus(options.nproc, flag=f"--nproc {options.nproc}")
    for row in options.rows:
        parsed_row(options, row)
