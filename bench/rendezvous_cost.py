"""Count what a restart costs the store of a job's launchers, for jobs of up to 1,024 ranks.

    python bench/rendezvous_cost.py --out rendezvous.json

*Simulated*: the launchers of all nodes are threads of one process and start no ranks. They meet,
the ranks of one node fail, all leave the round and meet again. Counted are each launcher's
operations on the store and their bytes, those that show that it is alive included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script(core=False)

from hetero.launch import rendezvous
from hetero.launch.exits import ProcessExit
from hetero.launch.job_store import RendezvousSettings
from hetero.launch.rendezvous import JobRendezvous
from hetero.recover.node_state import Generation, Inventory
from hetero.startup.store import BoundedStore
from hetero.text import integer
from hetero.tools.tool_command_line import Parser, require_results_file, run
from tests.distributed.harness import free_port

_PATIENCE = 300.0
_RANKS_OF_A_NODE = 8


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one restart."""

    nodes: int
    ranks: int
    seconds: float
    """Until all launchers have the new round, in one process."""
    operations: float
    """Of a launcher, on average."""
    most_operations: int
    bytes: float
    most_bytes: int
    host_operations: int
    """Of the thread that forms the round."""
    host_bytes: int


class _Count:
    def __init__(self) -> None:
        self.operations = self.bytes = 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--nodes",
        type=integer(2),
        nargs="+",
        default=[2, 16, 128],
        help="numbers of nodes, of 8 ranks each",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON file")
    options = parser.parse_args(argv)
    return run(lambda: _measure(options))


def _measure(options: argparse.Namespace) -> str:
    require_results_file(options.out)
    costs = [restart_cost(nodes) for nodes in options.nodes]
    record = {
        "date": date.today().isoformat(),
        "command": " ".join(sys.argv),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "costs": [asdict(cost) for cost in costs],
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    lines = ["| nodes | ranks | operations a launcher | bytes a launcher | of the host | s |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [
        f"| {one.nodes} | {one.ranks} | {one.operations:.0f}, most {one.most_operations} "
        f"| {one.bytes:,.0f}, most {one.most_bytes:,} "
        f"| {one.host_operations:,}, {one.host_bytes:,} bytes | {one.seconds:.1f} |"
        for one in costs
    ]
    return "\n".join(lines)


def restart_cost(nodes: int) -> Cost:
    """Measure one restart of a job of `nodes` nodes."""
    counts: dict[str, _Count] = {}
    with _Counting(counts), ThreadPoolExecutor(nodes) as threads:
        port = free_port()
        launchers = [_launcher(node, nodes=nodes, port=port) for node in range(nodes)]
        try:
            everyone = list(enumerate(launchers))
            _all(threads, [_named(f"node {n}", one.next_rendezvous) for n, one in everyone])
            counts.clear()
            begun = time.monotonic()
            launchers[-1].add_exits([ProcessExit(rank=0, host="host", code=-9, time=1)])
            _all(threads, [_named(f"node {n}", _left_and_met(one)) for n, one in everyone])
            seconds = time.monotonic() - begun
        finally:
            for launcher in launchers:
                launcher.close()
    of_nodes = [one for name, one in counts.items() if name.startswith("node ")]
    host = counts.get("rendezvous", _Count())
    ticks = counts.get("launcher's ticks", _Count())
    return Cost(
        nodes=nodes,
        ranks=nodes * _RANKS_OF_A_NODE,
        seconds=seconds,
        operations=(sum(one.operations for one in of_nodes) + ticks.operations) / nodes,
        most_operations=max(one.operations for one in of_nodes),
        bytes=(sum(one.bytes for one in of_nodes) + ticks.bytes) / nodes,
        most_bytes=max(one.bytes for one in of_nodes),
        host_operations=host.operations,
        host_bytes=host.bytes,
    )


def _launcher(node: int, *, nodes: int, port: int) -> JobRendezvous:
    settings = RendezvousSettings(
        backend="static",
        endpoint=f"127.0.0.1:{port}",
        nodes=nodes,
        node_rank=node,
        processes=_RANKS_OF_A_NODE,
        timeout=_PATIENCE,
        restarts=3,
        restarts_at_once=True,
        address="127.0.0.1",
        is_host=node == 0,
    )
    vendor = "amd" if node < nodes // 2 else "nvidia"
    state = _state(node, nodes=nodes)
    return JobRendezvous(settings, vendor=vendor, check_abort=lambda: None, state=lambda: state)


def _state(node: int, *, nodes: int) -> Mapping[str, Any]:
    """As a node has it with state in memory: two generations of its own, two of its partner's."""
    everything = frozenset(_files(range(nodes * _RANKS_OF_A_NODE)))

    def held(owner: int) -> tuple[Generation, ...]:
        first = owner * _RANKS_OF_A_NODE
        present = frozenset(_files(range(first, first + _RANKS_OF_A_NODE)))
        return tuple(Generation(i, f"{i:064d}", everything, present) for i in (120, 110))

    partner = (node + nodes // 2) % nodes
    inventory = Inventory(own=held(node), copies={partner: held(partner)})
    return {"port": 40_000, "token": "0" * 32, "inventory": inventory.to_record()}


def _files(ranks: Sequence[int]) -> list[str]:
    return [f"rank_{rank:05d}.safetensors" for rank in ranks]


def _left_and_met(launcher: JobRendezvous) -> Callable[[], object]:
    def work() -> object:
        deadline = time.monotonic() + _PATIENCE
        has_failed = bool(launcher._exits)
        while not has_failed and not launcher.num_nodes_waiting():
            if time.monotonic() > deadline:
                raise RuntimeError("it was never asked to leave its round")
            time.sleep(0.1)  # as torchelastic's agent looks
        return launcher.next_rendezvous()

    return work


def _named(name: str, work: Callable[[], object]) -> Callable[[], object]:
    def renamed() -> object:
        threading.current_thread().name = name
        return work()

    return renamed


def _all(threads: ThreadPoolExecutor, work: Sequence[Callable[[], object]]) -> None:
    for one in [threads.submit(each) for each in work]:
        one.result(_PATIENCE)


class _Counting:
    """Count operations of stores by the name of the thread that asks for them."""

    def __init__(self, counts: dict[str, _Count]) -> None:
        self._counts = counts

    def __enter__(self) -> None:
        counts = self._counts

        class Counted(BoundedStore):
            def __getattr__(self, name: str) -> Any:
                operation = super().__getattr__(name)

                def counted(*arguments: Any) -> Any:
                    answer = operation(*arguments)
                    count = counts.setdefault(threading.current_thread().name, _Count())
                    count.operations += 1
                    count.bytes += sum(_size(one) for one in (*arguments, answer))
                    return answer

                return counted if callable(operation) else operation

        rendezvous.BoundedStore = Counted  # type: ignore[misc]

    def __exit__(self, *_: object) -> None:
        rendezvous.BoundedStore = BoundedStore  # type: ignore[misc]


def _size(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str | bytes) else 8 * (value is not None)


if __name__ == "__main__":
    sys.exit(main())
