"""What a benchmark was asked for and what it found, as perf.json holds it. Pure data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hetero.text import size_text

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FILE = "perf.json"
_MAX_QUEUE_DEPTH = 8
_QUEUED_BYTES = 256 * MIB


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every measurement is given. Sizes are bytes, times seconds."""

    sizes: tuple[int, ...] = ()
    device: str = "cpu"
    """Where the tensors lie: cpu, or cuda for a GPU of any vendor."""
    seconds_a_point: float = 1.0
    """For one row at one size, shared by all its figures. Each has a few samples anyway."""
    repeats: int = 2000
    """Samples of one figure, at most."""
    timeout: float = 60.0


@dataclass(frozen=True, kw_only=True)
class LinkOptions(Options):
    """Of a run between two processes."""

    sizes: tuple[int, ...] = (
        *(4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB),
        *(1 * MIB, 4 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 256 * MIB),
        1 * GIB,
    )
    transports: tuple[str, ...] = ()
    ring_bytes: int = 64 * MIB
    chunk_bytes: int | None = None
    """The slots of the rings; None for what suits each transport."""
    connections: int = 4
    idle_seconds: float = 2.0
    """How long the open links are watched while nothing is sent."""
    keep_threads: bool = False
    """Leave torch its threads; otherwise a copy is one core's work."""


@dataclass(frozen=True, kw_only=True)
class CollectiveOptions(Options):
    """Of a run between the ranks of a group."""

    sizes: tuple[int, ...] = tuple(4 * KIB * 4**n for n in range(10))
    seconds_a_point: float = 0.5
    repeats: int = 1000
    timeout: float = 120.0
    backends: tuple[str, ...] = ("gloo", "nccl", "hetero")
    operations: tuple[str, ...] = ()
    parts: tuple[int, ...] = (1, 1)
    """Ranks of each simulated vendor; one number for ranks of the vendor that is there."""
    dtype: str = "float32"
    reduction: str = "sum"


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

    def over(self, count: int) -> Timing:
        """Of one of so many that were timed together."""
        return Timing(self.median / count, self.p99 / count, self.samples)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One row at one size. A figure is None where it was not measured or has no meaning.

    Times are microseconds: of a link one message, of a collective one call of the slowest rank.
    """

    name: str
    """The transport, the backend, or the bare path."""
    nbytes: int
    """Of a collective, as in nccl-tests: before a reduce_scatter and after an all_gather."""
    operation: str = ""
    """Of a collective."""
    in_place: bool | None = None
    is_limit: bool = False
    """Whether it is a bare copy, socket, RDMA write or link, which bounds what is measured."""
    wrong: int | None = None
    """Elements that differ from the reference, over all ranks, before and after the timing."""
    latency_us: float | None = None
    """One at a time. Of a link half a round trip, both ends having the tensor in hand."""
    latency_p99_us: float | None = None
    time_us: float | None = None
    """One of several that were queued before one wait; collectives on a CPU block each."""
    time_p99_us: float | None = None
    busbw_gb_s: float | None = None
    after_idle_us: float | None = None
    """One message one way after nothing was sent for a while."""
    after_idle_p99_us: float | None = None
    both_gb_s: float | None = None
    """A message each way at once, both directions together."""
    cpu_send_us: float | None = None
    """CPU time of the sending process for one message, all its threads together."""
    cpu_recv_us: float | None = None
    queue_depth: int | None = None
    samples: int | None = None
    limit: str | None = None
    """The bare path that bounds it."""
    limit_us: float | None = None
    """What that took in this run for the bytes that have to cross."""

    def beside(self, limit: Point, *, share: float = 1.0) -> Point:
        """With what the bare path took for this share of the bytes."""
        return replace(self, limit=limit.name, limit_us=(limit.time_us or 0.0) * share)

    @property
    def algbw_gb_s(self) -> float | None:
        """The size over the time, in 10^9 bytes a second."""
        return None if self.time_us is None else self.nbytes / self.time_us / 1e3

    @property
    def share_of_limit(self) -> float | None:
        return self.limit_us / self.time_us if self.limit_us and self.time_us else None

    def as_mapping(self) -> dict[str, Any]:
        """With the figures that follow from the others."""
        derived = {"algbw_gb_s": self.algbw_gb_s, "share_of_limit": self.share_of_limit}
        return asdict(self) | derived


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


@dataclass
class Record:
    """A whole run. Every rank fills its own, and all of them make the same."""

    options: Options
    facts: dict[str, Any] = field(default_factory=dict)
    """Ranks, device, driver, versions, date, command line and what else places the numbers."""
    points: list[Point] = field(default_factory=list)
    links: list[LinkFacts] = field(default_factory=list)
    idle_cores: Mapping[str, Any] | None = None
    """Cores that each of two processes keeps busy while nothing is sent, with and without links."""
    notes: list[str] = field(default_factory=list)
    """What was not measured and why; what is simulated or emulated."""
    failed: list[str] = field(default_factory=list)
    """What gave wrong results, or broke after it had worked; `notes` says how."""

    def as_mapping(self) -> dict[str, Any]:
        """What perf.json holds."""
        return {
            **self.facts,
            "options": asdict(self.options),
            "notes": list(dict.fromkeys(self.notes)),
            "failed": list(dict.fromkeys(self.failed)),
            "links": [asdict(link) for link in self.links],
            "idle_cores": self.idle_cores,
            "points": [point.as_mapping() for point in self.points],
        }


def queue_depth(nbytes: int) -> int:
    """How many messages are queued at once: enough to overlap, few enough for staging copies."""
    return min(_MAX_QUEUE_DEPTH, max(2, _QUEUED_BYTES // nbytes))


def short_size(nbytes: int) -> str:
    """A size as it was asked for: 64 KiB, and not 64.0 KiB."""
    return size_text(nbytes).replace(".00 ", " ").replace(".0 ", " ")
