"""What a run of the link benchmark was asked for, and what it found. Pure data."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hetero.text import counted

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DEFAULT_SIZES = (
    *(4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB),
    *(1 * MIB, 4 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 256 * MIB),
    1 * GIB,
)
_UNITS = {"K": KIB, "M": MIB, "G": GIB}
_MAX_QUEUE_DEPTH = 8
_QUEUED_BYTES = 256 * MIB

MEMORY_COPY = "bare memory copy"
TO_PINNED = "bare GPU-to-pinned copy"
FROM_PINNED = "bare pinned-to-GPU copy"
PEER_COPY = "bare GPU-to-GPU copy"
RDMA_WRITE = "ib_write_bw"


def sockets_name(connections: int) -> str:
    return f"bare TCP, {counted(connections, 'connection')}"


@dataclass(frozen=True)
class Options:
    """What is measured, and for how long. Sizes are bytes."""

    transports: tuple[str, ...]
    sizes: tuple[int, ...] = DEFAULT_SIZES
    seconds_a_point: float = 1.0
    """Time for one path at one size, shared by all its figures. Each has a few samples anyway."""
    repeats: int = 2000
    """Samples of one figure, at most."""
    ring_bytes: int = 64 * MIB
    chunk_bytes: int | None = None
    """The slots of the rings; None for what suits each transport."""
    connections: int = 4
    idle_seconds: float = 2.0
    """How long the open links are watched while nothing is sent."""
    timeout: float = 60.0
    on_cpu: bool = False
    """CPU tensors even where there are GPUs."""
    keep_threads: bool = False
    """Leave torch its threads; otherwise a copy is one core's work."""


@dataclass(frozen=True)
class Timing:
    """The median of some seconds, and their 99th percentile: the slow end."""

    median: float
    p99: float
    samples: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        ordered = sorted(seconds)
        # The nearest rank: of fewer than a hundred samples it is the slowest.
        p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
        return cls(median=statistics.median(ordered), p99=p99, samples=len(ordered))

    def gb_s(self, nbytes: int) -> tuple[float, float]:
        """10^9 bytes a second at the median time and at the 99th percentile."""
        return nbytes / self.median / 1e9, nbytes / self.p99 / 1e9


@dataclass(frozen=True)
class Point:
    """One path at one size. A figure is None where it was not measured or has no meaning."""

    path: str
    is_limit: bool
    """Whether it is a bare copy, socket or RDMA write instead of a transport."""
    nbytes: int
    latency_us: float | None = None
    """Half of a round trip, both ends having the tensor in hand."""
    latency_p99_us: float | None = None
    ping_pong_gb_s: float | None = None
    """The message over its latency: one message at a time."""
    after_idle_us: float | None = None
    """One message one way after nothing was sent for a while."""
    after_idle_p99_us: float | None = None
    bandwidth_gb_s: float | None = None
    """Messages queued back to back one way, then one wait for all of them."""
    bandwidth_p99_gb_s: float | None = None
    both_gb_s: float | None = None
    """A message each way at once, both directions together."""
    both_p99_gb_s: float | None = None
    cpu_send_us: float | None = None
    """CPU time of the sending process for one message, all its threads together."""
    cpu_recv_us: float | None = None
    queue_depth: int | None = None
    latency_samples: int | None = None
    limit: str | None = None
    """The bare path that bounds this transport."""
    share_of_limit: float | None = None
    """Its bandwidth over the limit's at the same size."""


@dataclass(frozen=True)
class LinkFacts:
    """An open link: what it turned out to be and what it holds."""

    path: str
    transport: str
    """What the link calls itself: `auto` and `cpu-forward` choose."""
    host_bytes: int | None
    """By how much the two processes grew together, once every slot had been used; None where the
    kernel does not say. Memory that a driver pins may not count as a process's."""
    device_bytes: int
    """By how much the memory in use on the GPUs grew, both together."""
    open_seconds: float
    passed_over: tuple[str, ...] = ()
    """Why `auto` did not take what is faster."""


@dataclass(frozen=True)
class IdleUse:
    """Cores that a process keeps busy while nothing is sent, for rank 0 and rank 1."""

    seconds: float
    without_links: tuple[float, float]
    with_links: tuple[float, float]


@dataclass(frozen=True)
class Record:
    """A whole run."""

    facts: Mapping[str, Any]
    """Device, driver, versions, date, command line and whatever else places the numbers."""
    options: Options
    points: tuple[Point, ...]
    links: tuple[LinkFacts, ...]
    idle: IdleUse | None
    notes: tuple[str, ...]
    """What was not measured and why; what is simulated or emulated."""
    failed: tuple[str, ...] = ()
    """Transports that opened and then broke; `notes` says how."""

    def as_mapping(self) -> dict[str, Any]:
        """What `links.json` holds."""
        return {
            **self.facts,
            "options": asdict(self.options),
            "notes": list(self.notes),
            "failed": list(self.failed),
            "links": [asdict(link) for link in self.links],
            "idle_cores": None if self.idle is None else asdict(self.idle),
            "points": [asdict(point) for point in self.points],
        }


def parse_size(text: str) -> int:
    """Bytes from 4096, 64K, 32M or 1G."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not (digits.isascii() and digits.isdecimal()) or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 4096, 64K, 32M or 1G")
    return int(digits) * unit


def queue_depth(nbytes: int) -> int:
    """How many messages are queued at once: enough to overlap, few enough for staging copies."""
    return min(_MAX_QUEUE_DEPTH, max(2, _QUEUED_BYTES // nbytes))


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
