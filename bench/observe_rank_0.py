"""Measure what all ranks' records cost rank 0: CPU time and bytes a second, in simulated worlds.

    python bench/observe_rank_0.py --json observe.json

A second process opens a connection for each simulated rank to a real LivenessServer, as a rank
would, and sends records of four links and two calls at the heartbeat's interval for that world.
CPU time is that of the server's process, which does nothing else; a look is what one reader of the
live view costs beside it, once the state is as old as it may be.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script(core=False, needs="prometheus_client")

from hetero.errors import HeteroError, UserError
from hetero.observe.collect import Collector
from hetero.observe.record import (
    CallState,
    LinkState,
    Phase,
    ProcessState,
    RailState,
    Recorder,
    Snapshot,
)
from hetero.observe.server import MetricsServer
from hetero.observe.state import RankDescription, RunDescription
from hetero.startup.liveness import LivenessServer
from hetero.startup.process import allow_open_files
from hetero.text import integer, number
from hetero.tools.tool_command_line import Parser, require_results_file, run

_TOKEN = "bench"
_HEARTBEATS_A_SECOND = 1024
_CONNECT_SECONDS = 300.0


def record(rank: int, second: int) -> bytes:
    """What a rank of a mixed run sends: four links of four rails, waits, calls."""
    links = tuple(
        LinkState(
            peer=(rank + offset) % (1 << 14),
            transport="verbs",
            is_boundary=True,
            bytes_sent=second * 10_000_000_000 + rank,
            bytes_received=second * 10_000_000_000 + rank,
            messages_sent=second * 64,
            messages_received=second * 64,
            wait_seconds=0.25 * second,
            queued=1,
            oldest="receive message 12345",
            oldest_seconds=0.125,
            rails=tuple(RailState(name=f"mlx5_{n}", bytes_sent=second << 31) for n in range(4)),
        )
        for offset in (8, 16, 24, 32)
    )
    calls = tuple(
        CallState(
            group="data 3",
            sequence=1000 + second,
            operation="all_reduce",
            state="started",
            seconds=0.5,
            sizes=((4096, 4096),),
        )
        for _ in range(2)
    )
    snapshot = Snapshot(
        rank=rank,
        pid=100_000 + rank,
        host=f"node-{rank // 8}",
        phase=Phase.FORWARD,
        seconds=0.1,
        iteration=second,
        phase_seconds=dict.fromkeys(Phase, 12.3456 * second),
        calls=calls,
        links=links,
        process=ProcessState(main_thread="R", cpu=0.9, resident_bytes=1 << 34),
        values={"loss": 2.345678, "grad_norm": 0.987654, "tokens_per_s": 123456.7},
    )
    return replace(snapshot, memory_bytes=70 << 30).to_json()


def simulate_ranks(port: int, world_size: int, seconds: float, report: Connection) -> None:
    """In a process of its own: all ranks but 0, connected, each sending at its interval."""
    allow_open_files()
    connections = []
    for rank in range(1, world_size):
        connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        greeting = {"token": _TOKEN, "rank": rank, "host": f"node-{rank // 8}"}
        connection.sendall(json.dumps(greeting).encode() + b"\n")
        connections.append(connection)
    with selectors.DefaultSelector() as answers:
        for connection in connections:
            answers.register(connection, selectors.EVENT_READ)
        waiting = len(connections)
        while waiting:
            for key, _ in answers.select(60):
                if b"welcome" not in key.fileobj.recv(1 << 12):  # type: ignore[union-attr]
                    raise HeteroError("the server refused a simulated rank")
                answers.unregister(key.fileobj)
                waiting -= 1
    lines = [b"=" + record(rank, 1) + b"\n" for rank in range(1, world_size)]
    report.send("connected")
    interval = max(1.0, world_size / _HEARTBEATS_A_SECOND)
    began, sent_bytes, sent, late = time.monotonic(), 0, 0, 0.0
    rounds = 0
    while time.monotonic() - began < seconds:
        for at, (connection, line) in enumerate(zip(connections, lines, strict=True)):
            due = began + interval * (rounds + at / len(connections))
            if (pause := due - time.monotonic()) > 0.002:
                time.sleep(pause)
            late = max(late, time.monotonic() - due)
            if time.monotonic() - began >= seconds:
                break
            connection.sendall(line)
            sent_bytes += len(line)
            sent += 1
        rounds += 1
    report.send((time.monotonic() - began, sent_bytes, sent, late))
    report.recv()


def measure(world_size: int, seconds: float) -> dict[str, Any]:
    """CPU time and bytes a second of rank 0, and what a look at everything takes."""
    server = LivenessServer(world_size=world_size, token=_TOKEN)
    collector = Collector(Recorder())
    server.on_record(collector.add)
    mine, theirs = multiprocessing.Pipe()
    ranks = multiprocessing.get_context("spawn").Process(
        target=simulate_ranks, args=(server.port, world_size, seconds, theirs), daemon=True
    )
    # It inherits the mask: an interrupt ends this process, which ends that one. Starting the
    # tracker would unblock the signal.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    ranks.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if not mine.poll(_CONNECT_SECONDS) or mine.recv() != "connected":
        raise HeteroError(f"{world_size} simulated ranks have not connected")
    before = resource.getrusage(resource.RUSAGE_SELF)
    if not mine.poll(seconds + 60):
        raise HeteroError("the simulated ranks hang")
    after = resource.getrusage(resource.RUSAGE_SELF)
    elapsed, sent_bytes, sent, late = mine.recv()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    places = tuple(RankDescription(rank=rank, stage=rank // 128) for rank in range(world_size))
    description = RunDescription(world_size=world_size, ranks=places)
    view = MetricsServer(collector, describe=lambda: description)
    looks = {}
    for name, look in (("state", view.state), ("metrics", view.metrics)):
        began = time.process_time()
        look()
        looks[name] = time.process_time() - began
    size = len(json.dumps(view.state(), separators=(",", ":")))
    view.close()
    mine.send("end")
    ranks.join(30)
    found = {
        "ranks": world_size,
        "ranks_seen": len(collector.seen()),
        "seconds": round(elapsed, 2),
        "records": sent,
        "bytes_of_a_record": round(sent_bytes / max(1, sent)),
        "bytes_per_second": round(sent_bytes / elapsed),
        "cpu_seconds_per_second": round(cpu / elapsed, 5),
        "cpu_microseconds_per_record": round(1e6 * cpu / max(1, sent), 1),
        "senders_were_late_by_seconds": round(late, 3),
        "cpu_seconds_of_a_look": {name: round(value, 4) for name, value in looks.items()},
        "bytes_of_the_state": size,
    }
    server.leave()
    return found


def _measure_all(options: argparse.Namespace) -> str:
    require_results_file(options.json, "--json")
    allow_open_files()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < max(options.ranks) + 64:
        raise UserError(
            f"as many files must be open as there are ranks ({max(options.ranks)}), and the limit "
            f"is {limit}; "
            "raise it with ulimit -n, or name fewer --ranks"
        )
    result: dict[str, Any] = {
        "command": "python bench/observe_rank_0.py",
        "date": date.today().isoformat(),
        "hardware": f"{os.cpu_count()}-core {platform.machine()} CPU",
        "python": platform.python_version(),
        "is_simulated": True,
        "worlds": [],
    }
    for world_size in options.ranks:
        found = measure(world_size, options.seconds)
        result["worlds"].append(found)
        print(found, flush=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    return f"written to {options.json}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--ranks",
        type=integer(2),
        nargs="+",
        default=[1024, 16384],
        metavar="N",
        help="numbers of simulated ranks",
    )
    parser.add_argument(
        "--seconds", type=number(above=0), default=40.0, help="seconds that each world is watched"
    )
    parser.add_argument(
        "--json", type=Path, required=True, metavar="FILE", help="the JSON file to write"
    )
    options = parser.parse_args(argv)
    return run(lambda: _measure_all(options))


if __name__ == "__main__":
    sys.exit(main())
