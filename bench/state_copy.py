"""Measure how fast a node's state in memory is copied to another node, and fetched after a loss.

    python bench/state_copy.py --json state_copy.json [--gigabytes 2] [--files 1 8] [--tries 3]

*Emulated*: two processes of this host play two nodes. One holds a generation of random bytes, in as
many files as ranks; the other's Replicator copies it, and `fetch` brings it in place for a restart
in which the ranks have moved there. Beside them, in the same process and on the same files, what
bare TCP takes: `sendfile` and `recv_into` into one buffer, on one connection and on four. CPU
seconds are those of both processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script(core=False)

import psutil

from hetero.errors import HeteroError
from hetero.recover.choose import choose
from hetero.recover.node_state import Inventory, NodeState
from hetero.recover.replication import Peer, Replicator, StateServer, fetch
from hetero.recover.stored_files import BLOCK_BYTES, INDEX_FILE, folder_name
from hetero.text import integer, number
from hetero.tools.tool_command_line import Parser, require_results_file, run

_ITERATION = 10
_TOKEN = "of this benchmark"
_BUFFER_BYTES = 4 << 20
_PATIENCE = 300.0


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of one way to move the generation, the median of all tries."""

    path: str
    files: int
    gb_s: float
    """10^9 bytes a second, checksums included."""
    all_gb_s: Sequence[float]
    cpu_s_per_gb: float
    """Of both processes."""


def write_generation(folder: Path, *, size: int, files: int) -> None:
    """A whole generation of `files` ranks, `size` bytes together."""
    path = folder / folder_name(_ITERATION)
    path.mkdir()
    named = {}
    for rank in range(files):
        name, blocks, left = f"rank_{rank:05d}.safetensors", [], size // files
        with (path / name).open("wb", buffering=0) as file:
            while left:
                block = os.urandom(min(BLOCK_BYTES, left))
                blocks.append(zlib.crc32(block))
                left -= file.write(block)
        named[name] = [size // files, blocks]
    index = {"sha256": "of this benchmark", "checkpoint": {"files": named}}
    (path / INDEX_FILE).write_text(json.dumps(index))


def _serve(pipe: Connection, size: int, files: int) -> None:
    """The other node, until the pipe brings something."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
    with NodeState.create() as state:
        write_generation(state.folder, size=size, files=files)
        server = StateServer(state, token=_TOKEN)
        bare = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=_serve_bare, args=(bare, state.folder), daemon=True).start()
        pipe.send((server.port, bare.getsockname()[1], state.inventory().to_record()))
        pipe.poll(_PATIENCE)
        server.close()


def _serve_bare(listener: socket.socket, folder: Path) -> None:
    """Send a file's range to each connection that names one."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_send_bare, args=(connection, folder), daemon=True).start()


def _send_bare(connection: socket.socket, folder: Path) -> None:
    with connection:
        while line := connection.recv(200):
            rank, begin, count = map(int, line.split())
            name = f"{folder_name(_ITERATION)}/rank_{rank:05d}.safetensors"
            with (folder / name).open("rb") as file:
                connection.sendfile(file, begin, count)


def _receive_bare(port: int, ranges: list[tuple[int, int, int]]) -> None:
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE) as connection:
        while ranges:
            try:
                rank, begin, left = ranges.pop()
            except IndexError:  # taken by another connection
                return
            connection.sendall(f"{rank} {begin} {left}".encode())
            while left:
                count = connection.recv_into(buffer[: min(left, len(buffer))])
                if not count:
                    raise HeteroError("the process that plays the other node has ended")
                left -= count


def _bare(port: int, *, size: int, files: int, connections: int) -> None:
    share = size // files
    ranges = [
        (rank, begin, min(BLOCK_BYTES, share - begin))
        for rank in range(files)
        for begin in range(0, share, BLOCK_BYTES)
    ]
    with ThreadPoolExecutor(connections) as pool:
        for done in [pool.submit(_receive_bare, port, ranges) for _ in range(connections)]:
            done.result()


def measured(*, size: int, files: int, tries: int) -> list[Speed]:
    """All paths in turn, `tries` times."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_serve, args=(theirs, size, files), daemon=True)
    child.start()
    theirs.close()
    port, bare_port, record = mine.recv()
    peer = Peer(0, "127.0.0.1", port, _TOKEN)
    processes = [psutil.Process(), psutil.Process(child.pid)]

    def replicate(state: NodeState) -> None:
        replicator = Replicator(state, peer)
        deadline = time.monotonic() + _PATIENCE
        while replicator.newest != _ITERATION:
            if time.monotonic() > deadline:
                raise HeteroError(f"no copy after {_PATIENCE:g} s: {replicator.problem}")
            time.sleep(0.005)
        replicator.close()

    def fetch_all(state: NodeState) -> None:
        inventories = {0: Inventory.from_record(record), 1: state.inventory()}
        choice = choose(inventories, None, ranks={1: range(files)})
        fetch(state, choice, node=1, peers={0: peer})

    paths: dict[str, Callable[[NodeState], None]] = {
        "bare TCP, 1 connection": lambda _: _bare(bare_port, size=size, files=files, connections=1),
        "bare TCP, 4 connections": lambda _: _bare(
            bare_port, size=size, files=files, connections=4
        ),
        "copy to a partner": replicate,
        "fetch after a loss": fetch_all,
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in paths}
    try:
        for _ in range(tries):
            for name, path in paths.items():
                with NodeState.create() as state:
                    cpu, began = _cpu_seconds(processes), time.monotonic()
                    path(state)
                    seconds = time.monotonic() - began
                    taken[name].append((seconds, _cpu_seconds(processes) - cpu))
    finally:
        mine.send(None)
        child.join(_PATIENCE)
    gigabytes = size / 1e9
    return [
        Speed(
            path=name,
            files=files,
            gb_s=round(gigabytes / median(seconds for seconds, _ in each), 3),
            all_gb_s=[round(gigabytes / seconds, 3) for seconds, _ in each],
            cpu_s_per_gb=round(median(cpu for _, cpu in each) / gigabytes, 3),
        )
        for name, each in taken.items()
    ]


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def measure(args: argparse.Namespace, command: Sequence[str]) -> str:
    """Measure, and write the file. Returns the table."""
    size = int(args.gigabytes * 1e9)
    found = [
        speed
        for files in args.files
        for speed in measured(size=size // files * files, files=files, tries=args.tries)
    ]
    record = {
        "command": " ".join(["python bench/state_copy.py", *command]),
        "date": date.today().isoformat(),
        "hardware": f"{os.cpu_count()}-core {platform.machine()} CPU",
        "load": [round(load, 1) for load in os.getloadavg()],
        "emulated": True,
        "speeds": [asdict(speed) for speed in found],
    }
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    rows = ["| path | files | GB/s | all tries | CPU s per GB |", "|---|---|---|---|---|"]
    for one in found:
        tries = ", ".join(f"{speed:.2f}" for speed in one.all_gb_s)
        rows.append(
            f"| {one.path} | {one.files} | {one.gb_s:.2f} | {tries} | {one.cpu_s_per_gb:.2f} |"
        )
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument(
        "--gigabytes", type=number(above=0), default=2.0, help="size of the generation, 10^9 bytes"
    )
    parser.add_argument(
        "--files",
        type=integer(1),
        nargs="+",
        default=[1, 8],
        help="numbers of ranks of the node, a file each",
    )
    parser.add_argument("--tries", type=integer(1), default=3, help="number of tries of each path")
    words = sys.argv[1:] if argv is None else list(argv)

    def work() -> str:
        args = parser.parse_args(words)
        require_results_file(args.json)
        return measure(args, words)

    return run(work)


if __name__ == "__main__":
    sys.exit(main())
