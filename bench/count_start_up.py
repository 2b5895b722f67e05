"""Count what the start of a job costs each rank, and time it for as many as there is room for.

    python bench/count_start_up.py --out start_up.json
    python bench/count_start_up.py --counted 1024 --timed 8 --out start_up.json

Counted: the operations on the rendezvous store of an exchange between all ranks, and the groups
that a rank creates, for jobs of any size, in one process. Timed: real processes that meet, exchange
values and build their groups over gloo on this machine, and import nothing by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script(core=False)

import torch

from bench.start_up.counting import count_exchange, count_groups, two_meshes
from bench.start_up.light_processes import time_start
from hetero.errors import UserError
from hetero.plan import Plan
from hetero.tools.tool_command_line import Parser, require_results_file, run


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser((__doc__ or "").partition("\n")[0])
    for flag, sizes, what in (
        ("--counted", [64, 1024, 16384], "whose operations on the store are counted"),
        ("--timed", [8, 32, 64, 128], "that are started as light processes and timed"),
    ):
        parser.add_argument(
            flag,
            type=int,
            nargs="*",
            default=sizes,
            metavar="N",
            help=f"numbers of ranks {what}: powers of two from 8 on",
        )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the JSON file to write"
    )
    options = parser.parse_args(argv)
    return run(lambda: _measure(options))


def _measure(options: argparse.Namespace) -> str:
    require_results_file(options.out)
    for size in (*options.counted, *options.timed):
        if size < 8 or size & (size - 1):
            raise UserError(f"a job of {size}: use powers of two from 8 on")
    result: dict[str, Any] = {
        "command": "python bench/count_start_up.py",
        "date": date.today().isoformat(),
        "hardware": f"{os.cpu_count()}-core {platform.machine()} CPU",
        "torch": str(torch.__version__),
        "counted": {},
        "timed": {},
    }
    for size in options.timed:  # Before any thread is started: the processes are forked.
        result["timed"][size] = time_start(_plan(size), _payload)
        print(f"{size} timed: {result['timed'][size]}", flush=True)
    for size in options.counted:
        exchange, groups = count_exchange(size, _payload), count_groups(_plan(size))
        result["counted"][size] = {"exchange": exchange, "groups": groups}
        print(f"{size} counted: {exchange}, {groups}", flush=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return f"written to {options.out}"


def _payload(rank: int) -> dict[str, Any]:
    """What a rank tells in its first exchange: most of it its flags, which are the same on all."""
    return {
        "host": f"node-{rank // 8}",
        "local_rank": rank % 8,
        "torch_version": str(torch.__version__),
        "flags": {f"a_flag_with_a_name_{number}": number for number in range(250)},
    }


def _plan(size: int) -> Plan:
    """Two vendors, TP 8 where there is room, and four to sixteen stages."""
    tensor = 8 if size >= 64 else 2
    stages = 16 if size >= 4096 else 8 if size >= 1024 else 4 if size >= 32 else 2
    return two_meshes(stages=stages, tensor=tensor, data=size // (tensor * stages))


if __name__ == "__main__":
    sys.exit(main())
