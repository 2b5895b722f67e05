"""What a run of the collectives' benchmark was asked for, and what it found. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hetero.tools.link_bench.bench_record import GIB, KIB

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "uint8")
REDUCTIONS = ("sum", "avg", "min", "max", "product")
AGAIN = "-again"
"""A second group of a backend: how far the two differ is what a measurement cannot tell apart."""
BACKENDS = ("gloo", "nccl", "hetero", "flagcx", f"gloo{AGAIN}", f"nccl{AGAIN}")
OPERATIONS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"),
    "send_recv",
)
IN_PLACE_ONLY = ("all_reduce", "broadcast")
OUT_OF_PLACE_ONLY = ("all_to_all", "send_recv")


@dataclass(frozen=True)
class Options:
    """What is measured, and for how long. Sizes are bytes."""

    backends: tuple[str, ...] = ("gloo", "nccl", "hetero")
    operations: tuple[str, ...] = OPERATIONS
    parts: tuple[int, ...] = (1, 1)
    """Ranks of each simulated vendor; one number for ranks of the vendor that is there."""
    device: str = "cpu"
    smallest: int = 4 * KIB
    largest: int = GIB
    factor: int = 4
    dtype: str = "float32"
    reduction: str = "sum"
    seconds_a_point: float = 0.5
    """Time for one backend, operation and size. Each has a few samples anyway."""
    repeats: int = 1000
    """Samples of one figure, at most."""
    timeout: float = 120.0

    @property
    def sizes(self) -> tuple[int, ...]:
        found = [self.smallest]
        while found[-1] * self.factor <= self.largest:
            found.append(found[-1] * self.factor)
        return tuple(found)


@dataclass(frozen=True)
class Point:
    """One operation of one backend at one size. Times are microseconds of the slowest rank."""

    backend: str
    operation: str
    in_place: bool
    nbytes: int
    """nccl-tests' size: of the whole buffer, before a reduce_scatter and after an all_gather."""
    wrong: int
    """Elements that differ from the reference, over all ranks, before and after the timing."""
    time_us: float
    """One call of several queued ones on a GPU, and of those that block on a CPU."""
    time_p99_us: float
    latency_us: float
    """One call and a wait for the device."""
    latency_p99_us: float
    algbw_gb_s: float
    busbw_gb_s: float
    queue_depth: int
    samples: int
    boundary_us: float | None = None
    """What the links between the vendors took in this run to carry the bytes that have to cross."""

    @property
    def of_boundary(self) -> float | None:
        return None if self.boundary_us is None else self.boundary_us / self.time_us


@dataclass(frozen=True)
class BoundaryPoint:
    """The links between two vendors at one size, each way this many bytes, over all links at once.

    `one_way` is from the first rank's vendor to the other, `both_ways` both at once.
    """

    nbytes: int
    one_way_us: float
    both_ways_us: float

    @property
    def one_way_gb_s(self) -> float:
        return self.nbytes / self.one_way_us / 1e3

    @property
    def each_way_gb_s(self) -> float:
        """In each direction while both are used."""
        return self.nbytes / self.both_ways_us / 1e3


@dataclass(frozen=True)
class Record:
    """A whole run."""

    facts: Mapping[str, Any]
    """Device, driver, versions, date, command line and whatever else places the numbers."""
    options: Options
    vendors: tuple[str, ...]
    """By rank."""
    hosts: tuple[str, ...]
    points: tuple[Point, ...]
    boundary: tuple[BoundaryPoint, ...]
    boundary_transport: str | None
    notes: tuple[str, ...]
    """What was not measured and why; what is simulated."""
    failed: tuple[str, ...] = ()
    """What gave wrong results, or broke after it had worked; `notes` says how."""

    def as_mapping(self) -> dict[str, Any]:
        """What `collectives.json` holds."""
        return {
            **self.facts,
            "options": asdict(self.options),
            "vendors": list(self.vendors),
            "hosts": list(self.hosts),
            "notes": list(self.notes),
            "failed": list(self.failed),
            "boundary_transport": self.boundary_transport,
            "boundary": [
                asdict(p) | {"one_way_gb_s": p.one_way_gb_s, "each_way_gb_s": p.each_way_gb_s}
                for p in self.boundary
            ],
            "points": [asdict(p) | {"of_boundary": p.of_boundary} for p in self.points],
        }


def bus_factor(operation: str, ranks: int) -> float:
    """nccl-tests' busbw over its algbw: what each rank has to send of the size, whatever the way.

    Source: doc/PERFORMANCE.md of nccl-tests.
    """
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if operation in ("broadcast", "send_recv"):
        return 1.0
    return (ranks - 1) / ranks


def crossing_share(operation: str, vendors: tuple[str, ...]) -> float:
    """The bytes that have to cross between two vendors, in the direction with more, over the size.

    A vendor that adds up inside sends one partial result; what another vendor needs from several
    ranks of it crosses once.
    """
    size = len(vendors)
    first = vendors.count(vendors[0])
    more = max(first, size - first) / size
    if operation in ("all_reduce", "broadcast"):
        return 1.0
    if operation in ("all_gather", "reduce_scatter"):
        return more
    if operation == "all_to_all":
        return first * (size - first) / size
    # Each rank sends to the next.
    edges = [(vendors[rank], vendors[(rank + 1) % size]) for rank in range(size)]
    return float(sum(here == vendors[0] and there != here for here, there in edges))
