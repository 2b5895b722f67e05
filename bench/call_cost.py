"""Measure what each part of a small call of a group across vendors costs, in time and in calls.

    python bench/call_cost.py --json call_cost.json [--device cpu] [--rounds 40] [--calls 250]

Two ranks of two simulated vendors make one call after another, on a CPU each on a core of its own.
The parts are nested functions of the call's path. One is timed at a time, from its entry to its
return, so that timers never add up; a part costs its function's time less that of the next one
inside. Functions take turns, and a figure is the first decile of a function's calls, since other
work on the machine only adds to them, on the rank that takes longer. On a GPU this is the time of
the CPU, which enqueues calls. Calls of Python and of C functions are counted in other calls, by the
profiler's hook in the caller's thread; the call with the fewest counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from types import FrameType
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script(core=False)

import torch
import torch.distributed as dist

import hetero
from hetero.collectives.communicator import Communicator
from hetero.collectives.process_group import HeteroProcessGroup
from hetero.collectives.schedule import P2PBatch
from hetero.collectives.work import CollectiveWork
from hetero.link.ring_exchange import RingExchange
from hetero.text import integer
from hetero.tools.benchmark.collective import Case, Setup
from hetero.tools.benchmark.ranks import synchronize
from hetero.tools.launching.spawned_ranks import run_ranks
from hetero.tools.tool_command_line import Parser, require_results_file, run

VENDORS = ("nvidia", "amd")
OPERATIONS = {
    "all_reduce": 4 << 10,
    "all_gather": 64 << 10,
    "reduce_scatter": 64 << 10,
    "broadcast": 4 << 10,
    "send_recv": 4 << 10,
}
"""Bytes of each, as in nccl-tests: of the whole buffer."""
_TIMEOUT = timedelta(seconds=60)
_COUNTED_CALLS = 50
_C_FUNCTIONS = "functions of C"
_ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Part:
    """What a call spends between the entry of `functions` and that of the next part's."""

    name: str
    owner: type | None
    functions: tuple[str, ...]


_METHODS = (
    *("allreduce", "allgather", "all_gather_single", "_allgather_base", "reduce_scatter"),
    *("reduce_scatter_single", "_reduce_scatter_base", "broadcast", "send", "recv"),
)
PARTS = (
    Part("PyTorch", None, ()),
    Part("arguments", HeteroProcessGroup, _METHODS),
    Part("description, record, thread", Communicator, ("run", "send", "recv")),
    Part("algorithm", Communicator, ("_progress",)),
    Part("batch", P2PBatch, ("poll",)),
    Part("ring, with the wait for the peer", RingExchange, ("order",)),
)
"""From the outside in."""
WAIT = Part("wait of the handle", CollectiveWork, ("wait",))
"""Inside PyTorch's part."""


@contextmanager
def timed(part: Part, spent: list[int]) -> Iterator[None]:
    """Add nanoseconds to the last entry of `spent` while a function of the part runs."""
    before: dict[str, Any] = {}

    def timer(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            begun = time.perf_counter_ns()
            try:
                return function(*given, **named)
            finally:
                spent[-1] += time.perf_counter_ns() - begun

        return call

    for name in part.functions:
        if name in vars(part.owner or object):
            before[name] = vars(part.owner or object)[name]
            setattr(part.owner, name, timer(before[name]))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(part.owner, name, function)


def one_round(case: Case, part: Part, calls: int) -> list[int]:
    """Nanoseconds of each call inside a part, or of the whole call if it has no functions."""
    group = dist.distributed_c10d._get_default_group()
    spent: list[int] = []
    case.refill()
    with timed(part, spent):
        for _ in range(calls):
            spent.append(0)
            begun = time.perf_counter_ns()
            case.call(group)
            if not part.functions:
                spent[-1] = time.perf_counter_ns() - begun
    synchronize(case.result.device)
    return spent


def count_calls(case: Case) -> dict[str, int]:
    """Calls of Python functions in one call, by file from its package on, and those of C's."""
    group = dist.distributed_c10d._get_default_group()
    counters: list[Counter[str]] = []

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            counters[-1][_short(frame.f_code.co_filename)] += 1
        elif event == "c_call":
            counters[-1][_C_FUNCTIONS] += 1

    for _ in range(_COUNTED_CALLS):
        counters.append(Counter())
        sys.setprofile(on_event)
        try:
            case.call(group)
        finally:
            sys.setprofile(None)
    synchronize(case.result.device)
    fewest = min(counters, key=Counter.total)
    del fewest[_short(__file__)]
    return dict(sorted(fewest.items()))


def _short(path: str) -> str:
    """torch's files count as one; ours by their names in the package."""
    parts = Path(path).parts
    if "torch" in parts:
        return "torch"
    if "hetero" in parts and "collectives" in parts:
        return "/".join(parts[-2:])
    return "hetero/link" if "link" in parts else parts[-1]


def measure_rank(rank: int, folder: str, options: argparse.Namespace) -> None:
    """One of the two ranks, in a process of its own; leaves its figures in a file."""
    os.environ |= {"HETERO_VENDOR": VENDORS[rank], "LOCAL_RANK": str(rank)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:  # where both are on one for a while, a call takes twice as long
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    hetero.register()
    store = dist.FileStore(f"{folder}/store", len(VENDORS))
    dist.init_process_group(
        "hetero", store=store, rank=rank, world_size=len(VENDORS), timeout=_TIMEOUT
    )
    found = {}
    for operation in options.operations:
        size = OPERATIONS[operation]
        setup = Setup(rank, len(VENDORS), size // _ELEMENT_BYTES, torch.float32, device, "sum")
        case = next(iter(setup.cases(operation)))
        one_round(case, PARTS[0], options.calls)
        spent: dict[str, list[int]] = {part.name: [] for part in (*PARTS, WAIT)}
        for _ in range(options.rounds):
            for part in (*PARTS, WAIT):
                spent[part.name] += one_round(case, part, options.calls)
        inside = {name: statistics.quantiles(ns, n=10)[0] / 1e3 for name, ns in spent.items()}
        found[operation] = {"inside_us": inside, "calls": count_calls(case)}
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def parts_of(inside: dict[str, float]) -> dict[str, float]:
    """Microseconds of each part by itself, from those inside each function. Pure."""
    own = {
        part.name: inside[part.name] - (inside[inner.name] if inner is not None else 0.0)
        for part, inner in zip(PARTS, (*PARTS[1:], None), strict=True)
    }
    own[PARTS[0].name] -= inside[WAIT.name]
    own[WAIT.name] = inside[WAIT.name]
    return {name: round(value, 1) for name, value in own.items()}


def table(operations: dict[str, Any]) -> str:
    """One line an operation: the whole call, its parts, and calls of Python functions."""
    names = [*(part.name for part in PARTS), WAIT.name]
    lines = [f"us of a call | whole | {' | '.join(names)} | Python calls, torch's, C's"]
    for operation, found in operations.items():
        calls = dict(found["calls"])
        c_calls, torchs = calls.pop(_C_FUNCTIONS, 0), calls.get("torch", 0)
        parts = " | ".join(f"{found['parts_us'][name]:.1f}" for name in names)
        counts = f"{sum(calls.values()):.0f}, {torchs:.0f}, {c_calls:.0f}"
        lines.append(f"{operation} | {found['whole_us']:.1f} | {parts} | {counts}")
    return "\n".join(lines)


def _measure(options: argparse.Namespace) -> str:
    require_results_file(options.json, "--json")
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(measure_rank, (folder, options), ranks=len(VENDORS))
        ranks = [
            json.loads(Path(folder, f"rank_{rank}.json").read_text())
            for rank in range(len(VENDORS))
        ]
    operations = {}
    for operation in options.operations:
        whole = PARTS[0].name
        slower = max((rank[operation] for rank in ranks), key=lambda f: f["inside_us"][whole])
        operations[operation] = {
            "bytes": OPERATIONS[operation],
            "whole_us": round(slower["inside_us"][whole], 1),
            "parts_us": parts_of(slower["inside_us"]),
            "calls": slower["calls"],
        }
    on_gpu = options.device == "cuda"
    result = {
        "command": f"python bench/call_cost.py --device {options.device} "
        f"--rounds {options.rounds} --calls {options.calls}",
        "date": date.today().isoformat(),
        "hardware": torch.cuda.get_device_name()
        if on_gpu
        else f"{os.cpu_count()}-core {platform.machine()} CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "operations": operations,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    return f"{table(operations)}\nwritten to {options.json}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the tensors")
    parser.add_argument(
        "--operations",
        nargs="+",
        choices=tuple(OPERATIONS),
        default=list(OPERATIONS),
        help="what is measured",
    )
    parser.add_argument(
        "--rounds", type=integer(1), default=40, help="number of rounds over all parts"
    )
    parser.add_argument(
        "--calls", type=integer(2), default=250, help="number of calls in a round of a part"
    )
    parser.add_argument(
        "--json", type=Path, required=True, metavar="FILE", help="the JSON file to write"
    )
    options = parser.parse_args(argv)
    return run(lambda: _measure(options))


if __name__ == "__main__":
    sys.exit(main())
