"""The bare paths that bound what is measured: sockets, copies, RDMA writes, links of a boundary.

Each is measured at the same sizes, in the same run, as what it bounds.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path as FilePath

import torch
import torch.distributed as dist

import hetero
from hetero.collectives.links import nic_names
from hetero.device.topology import SYS
from hetero.errors import HeteroError
from hetero.link.base import Link
from hetero.startup.exchange import Exchange
from hetero.text import counted
from hetero.tools.benchmark.link import Path
from hetero.tools.benchmark.ranks import Ranks, synchronize
from hetero.tools.benchmark.record import Options, Point, Timing, queue_depth
from hetero.tools.launching.interrupts import answered_afterwards

MEMORY_COPY = "bare memory copy"
TO_PINNED = "bare GPU-to-pinned copy"
FROM_PINNED = "bare pinned-to-GPU copy"
PEER_COPY = "bare GPU-to-GPU copy"
RDMA_WRITE = "ib_write_bw"
"""Of the perftest package, and the program's name."""
# Within a host small buffers are the faster ones: what is in flight stays in the cache.
_SOCKET_BUFFER = 256 << 10
# Share of a point's time for each figure; a bare copy needs fewer samples than a link.
_COPYING = 0.1
_LEAST_COPIES = 3
_PERFTEST_SECONDS, _PERFTEST_TRIES = 20.0, 20
# perftest takes no fewer than 5 iterations.
_LEAST_ITERATIONS, _MOST_ITERATIONS = 5, 1000
_PERFTEST_BYTES = 256 << 20
_IPV4_PREFIX = "0000:0000:0000:0000:0000:ffff:"
_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)", re.MULTILINE)


def sockets_name(connections: int) -> str:
    return f"bare TCP, {counted(connections, 'connection')}"


def limit_of(transport: str, *, on_gpu: bool, connections: int) -> str | None:
    """The bare path that bounds a transport; None for one that we know no bare path of."""
    if transport == "shm":
        return TO_PINNED if on_gpu else MEMORY_COPY
    return {
        "gloo": sockets_name(1),
        "tcp": sockets_name(connections),
        "nccl": PEER_COPY,
        "ipc": PEER_COPY,
        "verbs": RDMA_WRITE,
        "verbs-host": RDMA_WRITE,
    }.get(transport)


class SocketPath(Path):
    """The bare limit of TCP: a loop of `sendall` and `recv_into`, a message cut over connections.

    With one connection the calling thread does it all, but for sending while it receives.
    """

    def __init__(self, name: str, connections: Sequence[socket.socket]) -> None:
        self.name, self.device = name, torch.device("cpu")
        self._connections = connections
        self._senders = ThreadPoolExecutor(len(connections), "bare send")
        self._receivers = ThreadPoolExecutor(len(connections), "bare recv")

    def send(self, tensor: torch.Tensor) -> None:
        self._move(tensor, 1, _send, self._senders)

    def recv(self, tensor: torch.Tensor) -> None:
        self._move(tensor, 1, _receive, self._receivers)

    def exchange(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        parts = zip(self._connections, self._parts(ours), strict=True)
        sending = [self._senders.submit(_send, *part, 1) for part in parts]
        self.recv(theirs)
        for future in sending:
            future.result()

    def send_all(self, tensor: torch.Tensor, count: int) -> None:
        self._move(tensor, count, _send, self._senders)

    def recv_all(self, tensor: torch.Tensor, count: int) -> None:
        self._move(tensor, count, _receive, self._receivers)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._senders.shutdown()
        self._receivers.shutdown()

    def _move(
        self,
        tensor: torch.Tensor,
        count: int,
        step: Callable[[socket.socket, memoryview, int], None],
        threads: ThreadPoolExecutor,
    ) -> None:
        parts = self._parts(tensor)
        others = [
            threads.submit(step, connection, part, count)
            for connection, part in zip(self._connections[1:], parts[1:], strict=True)
        ]
        step(self._connections[0], parts[0], count)
        for future in others:
            future.result()

    def _parts(self, tensor: torch.Tensor) -> list[memoryview]:
        """One piece of the message for each connection."""
        view = tensor.numpy().data
        count = len(self._connections)
        bounds = [len(view) * index // count for index in range(count + 1)]
        return [view[begin:end] for begin, end in pairwise(bounds)]


def open_sockets(
    name: str,
    *,
    rank: int,
    connections: int,
    store: dist.Store,
    timeout: float,
    address: str = "127.0.0.1",
) -> SocketPath:
    """Connect the two processes, to an address of rank 0's. Collective between them."""
    ports = Exchange(store, "ports", member=rank, size=2)
    if rank == 0:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=connections) as listener:
            listener.settimeout(timeout)
            ports.run({"port": listener.getsockname()[1]}, timeout=timeout)
            opened = [listener.accept()[0] for _ in range(connections)]
    else:
        there = (address, ports.run(timeout=timeout)[0]["port"])
        # In turn, so that both ends hold them in one order.
        opened = [socket.create_connection(there, timeout) for _ in range(connections)]
    for connection in opened:
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
    return SocketPath(name, opened)


def _send(connection: socket.socket, part: memoryview, count: int) -> None:
    for _ in range(count):
        connection.sendall(part)


def _receive(connection: socket.socket, part: memoryview, count: int) -> None:
    for _ in range(count):
        done = 0
        while done < len(part):
            arrived = connection.recv_into(part[done:])
            if arrived == 0:
                raise ConnectionError("the other process closed the connection")
            done += arrived


@dataclass(frozen=True)
class BareCopy:
    """One process's memory to copy from and to."""

    name: str
    source: torch.Tensor
    target: torch.Tensor
    by_both: bool
    """Whether the other process has a path of its own that it can load at the same time."""

    def seconds(self, count: int) -> float:
        """Of several copies and one wait."""
        begin = time.monotonic()
        for _ in range(count):
            self.target.copy_(self.source, non_blocking=True)
        for device in {self.source.device, self.target.device}:
            synchronize(device)
        return time.monotonic() - begin


def bare_copies(source: torch.Tensor) -> list[BareCopy]:
    """The copies that bound the links of a process whose tensors lie where `source` does."""
    if source.device.type != "cuda":
        return [BareCopy(MEMORY_COPY, source, torch.empty_like(source), by_both=True)]
    pinned = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
    other = torch.device("cuda", 1 - (source.device.index or 0))
    return [
        BareCopy(MEMORY_COPY, pinned, torch.empty_like(pinned, pin_memory=False), by_both=True),
        BareCopy(TO_PINNED, source, pinned, by_both=True),
        BareCopy(FROM_PINNED, pinned, torch.empty_like(source), by_both=True),
        BareCopy(PEER_COPY, source, torch.empty_like(source, device=other), by_both=False),
    ]


def measure_copy(copy: BareCopy, *, ranks: Ranks, options: Options) -> Point:
    """Rank 0 alone, and then both at once. Raises ExchangeError in both ranks alike."""
    nbytes = copy.source.numel()
    depth = queue_depth(nbytes)
    seconds = options.seconds_a_point * _COPYING

    def times(count: int) -> list[float]:
        copy.seconds(count)
        found: list[float] = []
        deadline = time.monotonic() + seconds
        while len(found) < _LEAST_COPIES or (
            time.monotonic() < deadline and len(found) < options.repeats
        ):
            found.append(copy.seconds(count))
        return found

    alone = ranks.together(lambda: (times(1), times(depth)) if ranks.leads else None)[0]
    if alone is None:
        raise RuntimeError("rank 0 measures alone")
    both = sum(ranks.together(lambda: rate(copy, seconds))) if copy.by_both else None
    latency, queued = Timing.of(alone[0]), Timing.of(alone[1]).over(depth)
    return Point(
        name=copy.name,
        is_limit=True,
        nbytes=nbytes,
        latency_us=latency.median * 1e6,
        latency_p99_us=latency.p99 * 1e6,
        time_us=queued.median * 1e6,
        time_p99_us=queued.p99 * 1e6,
        both_gb_s=both,
        queue_depth=depth,
        samples=latency.samples,
    )


def rate(copy: BareCopy, seconds: float) -> float:
    """10^9 bytes a second over a stretch of time, so that both processes copy all the while."""
    begin = time.monotonic()
    count = 0
    while count < _LEAST_COPIES or time.monotonic() < begin + seconds:
        copy.seconds(1)
        count += 1
    return count * copy.source.numel() / (time.monotonic() - begin) / 1e9


@dataclass(frozen=True)
class PerftestRun:
    """`ib_write_bw`, what RDMA does without us: a device writing to itself or to a second one."""

    devices: tuple[str, str]
    """Of the server and of the client."""
    port: int = 18515
    seconds: float = _PERFTEST_SECONDS
    sys_root: FilePath = SYS

    def rate(self, nbytes: int, *, both: bool) -> float:
        """10^9 bytes a second on average; with `both`, of the two directions together."""
        server = None
        try:
            with answered_afterwards(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                server = subprocess.Popen(
                    self._command(self.devices[0], nbytes, both),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            return parse_rate(self._client(server, nbytes, both), nbytes)
        finally:
            if server is not None:
                server.kill()
                server.communicate()

    def _client(self, server: subprocess.Popen[str], nbytes: int, both: bool) -> str:
        command = [*self._command(self.devices[1], nbytes, both), "127.0.0.1"]
        said = ""
        for _ in range(_PERFTEST_TRIES):
            try:
                ended = subprocess.run(
                    command, capture_output=True, text=True, timeout=self.seconds, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise HeteroError(f"{RDMA_WRITE} did not end within {self.seconds:g} s") from error
            if ended.returncode == 0:
                return ended.stdout
            said = ended.stdout + ended.stderr
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, _ = server.communicate(timeout=0.25)
                raise HeteroError(_last_line(out))
            # The server still listens: the client may have come too early.
        raise HeteroError(_last_line(said))

    def _command(self, device: str, nbytes: int, both: bool) -> list[str]:
        count = min(max(_PERFTEST_BYTES // nbytes, _LEAST_ITERATIONS), _MOST_ITERATIONS)
        flags = ["-d", device, "-s", str(nbytes), "-p", str(self.port), "-F", "--report_gbits"]
        flags += ["-n", str(count)]
        index = gid_index(device, sys_root=self.sys_root)
        if index is not None:
            flags += ["-x", str(index)]
        return [RDMA_WRITE, *flags, *(["-b"] if both else [])]


def gid_index(device: str, *, sys_root: FilePath) -> int | None:
    """The GID of RoCE v2 with an IPv4 address; None on InfiniBand, which needs none.

    perftest would take the first, which is RoCE v1 or of another subnet on many devices.
    """
    port = sys_root / "class/infiniband" / device / "ports/1"
    for entry in sorted(port.glob("gids/*"), key=lambda gid: int(gid.name)):
        try:
            kind = (port / "gid_attrs/types" / entry.name).read_text().strip()
            gid = entry.read_text().strip()
        except OSError:  # an index without a GID
            continue
        if kind == "RoCE v2" and gid.startswith(_IPV4_PREFIX):
            return int(entry.name)
    return None


def parse_rate(output: str, nbytes: int) -> float:
    """The average of the row of a size, from gigabits to 10^9 bytes a second."""
    for size, _, _, average, _ in _ROW.findall(output):
        if int(size) == nbytes:
            return float(average) / 8
    raise HeteroError(_last_line(output))


def perftest_missing(devices: Sequence[str]) -> str | None:
    """Why there is nothing to run on this host; None where there is."""
    if not devices:
        return f"{RDMA_WRITE}: this host has no RDMA device"
    if shutil.which(RDMA_WRITE) is None:
        return f"{RDMA_WRITE}: not installed (the perftest package has it)"
    return None


def measure_write(run: PerftestRun, nbytes: int) -> Point:
    """One size, one direction and both. Raises HeteroError."""
    return Point(
        name=RDMA_WRITE,
        is_limit=True,
        nbytes=nbytes,
        time_us=nbytes / run.rate(nbytes, both=False) / 1e3,
        both_gb_s=run.rate(nbytes, both=True),
    )


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip(" \n-")]
    return f"{RDMA_WRITE} failed: {lines[-1]}" if lines else f"{RDMA_WRITE} failed without a word"


class BoundaryLinks:
    """One rank's bare links to another vendor: what bounds every operation that crosses.

    Each rank of the larger vendor has one, and a message is divided between all, each way.
    """

    BOTH_WAYS, ONE_WAY = "bare links, both ways", "bare links, one way"
    """Their names as limits. One way is from the first rank's vendor to the other."""

    def __init__(
        self,
        *,
        rank: int,
        vendors: Sequence[str],
        store: dist.Store,
        device: torch.device,
        timeout: float,
    ) -> None:
        pairs = boundary_pairs(vendors)
        self._count = len(pairs)
        self._sends_first = vendors[rank] == vendors[0]
        self._device = device
        self._links: list[Link] = []
        with ExitStack() as opened:
            for pair in pairs:
                if rank in pair:
                    peer = pair[0] if rank == pair[1] else pair[1]
                    link = hetero.connect(
                        store,
                        rank=rank,
                        peer=peer,
                        device=device,
                        timeout=timeout,
                        nics=nic_names(),
                    )
                    self._links.append(opened.enter_context(link))
            self._opened = opened.pop_all()
        self._out = self._in = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def transport(self) -> str | None:
        return self._links[0].transport if self._links else None

    def prepare(self, nbytes: int) -> None:
        """Divide a message of this many bytes between the links."""
        part = max(nbytes // self._count, 1)
        self._out = torch.ones(part, dtype=torch.uint8, device=self._device)
        self._in = torch.zeros(part * len(self._links), dtype=torch.uint8, device=self._device)

    def both_ways(self) -> None:
        self._carry(sends=True, receives=True)

    def one_way(self) -> None:
        self._carry(sends=self._sends_first, receives=not self._sends_first)

    def _carry(self, *, sends: bool, receives: bool) -> None:
        works = [link.send(self._out) for link in self._links] if sends else []
        if receives:
            parts = self._in.split(self._out.numel())
            works += [link.recv(part) for link, part in zip(self._links, parts, strict=True)]
        for work in works:
            work.wait()

    def check(self) -> None:
        """Raise what broke a link, or that a message did not come whole."""
        for link in self._links:
            link.check()
        if not bool((self._in == 1).all()):
            raise RuntimeError("a message between the vendors was changed on its way")

    def __enter__(self) -> BoundaryLinks:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def boundary_pairs(vendors: Sequence[str]) -> list[tuple[int, int]]:
    """Each rank of the larger vendor with one of the other, evenly."""
    first = [rank for rank, vendor in enumerate(vendors) if vendor == vendors[0]]
    second = [rank for rank, vendor in enumerate(vendors) if vendor != vendors[0]]
    larger, smaller = sorted((first, second), key=len, reverse=True)
    return [(rank, smaller[place % len(smaller)]) for place, rank in enumerate(larger)]
