"""The bare copies that bound a link: host memory, to and from a GPU, and from GPU to GPU.

A rate is of one process while the other does nothing; both directions are the two processes copying
at once, each its own memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hetero.tools.link_bench.bench_record import (
    FROM_PINNED,
    MEMORY_COPY,
    PEER_COPY,
    TO_PINNED,
    Options,
    Point,
    Timing,
    queue_depth,
)
from hetero.tools.link_bench.measured_paths import synchronize
from hetero.tools.link_bench.two_ranks import Pair

# Shares of a point's time; a bare copy needs fewer samples than a link.
_ALONE, _QUEUED, _BOTH = 0.1, 0.1, 0.1
_AT_LEAST = 3


@dataclass(frozen=True)
class BareCopy:
    """One process's memory to copy from and to."""

    name: str
    source: torch.Tensor
    target: torch.Tensor
    by_both: bool
    """Whether the other process has a path of its own that it can load at the same time."""

    def start(self) -> None:
        self.target.copy_(self.source, non_blocking=True)

    def finish(self) -> None:
        for device in {self.source.device, self.target.device}:
            synchronize(device)


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


def measure_copy(copy: BareCopy, *, pair: Pair, options: Options) -> Point:
    """Collective between the two processes. Raises ExchangeError in both alike."""
    nbytes = copy.source.numel()
    depth = queue_depth(nbytes)
    alone = pair.together(lambda: _alone(copy, depth, options) if pair.leads else None).rank0
    if alone is None:
        raise RuntimeError("rank 0 measures alone")
    latency, queued = alone
    both = None
    if copy.by_both:
        rates = pair.together(lambda: rate(copy, options.seconds_a_point * _BOTH))
        both = rates.rank0 + rates.rank1
    bandwidth, bandwidth_p99 = queued.gb_s(depth * nbytes)
    return Point(
        path=copy.name,
        is_limit=True,
        nbytes=nbytes,
        latency_us=latency.median * 1e6,
        latency_p99_us=latency.p99 * 1e6,
        ping_pong_gb_s=latency.gb_s(nbytes)[0],
        bandwidth_gb_s=bandwidth,
        bandwidth_p99_gb_s=bandwidth_p99,
        both_gb_s=both,
        queue_depth=depth,
        latency_samples=latency.samples,
    )


def _alone(copy: BareCopy, depth: int, options: Options) -> tuple[Timing, Timing]:
    """One copy and a wait; and several copies and one wait."""
    seconds = options.seconds_a_point
    return (
        Timing.of(_times(copy, 1, budget=_ALONE * seconds, at_most=options.repeats)),
        Timing.of(_times(copy, depth, budget=_QUEUED * seconds, at_most=options.repeats)),
    )


def _times(copy: BareCopy, depth: int, *, budget: float, at_most: int) -> list[float]:
    def once() -> float:
        begin = time.monotonic()
        for _ in range(depth):
            copy.start()
        copy.finish()
        return time.monotonic() - begin

    once()
    deadline = time.monotonic() + budget
    return _collect(once, deadline, at_most=at_most)


def _collect(once: Callable[[], float], deadline: float, *, at_most: int) -> list[float]:
    times: list[float] = []
    while len(times) < _AT_LEAST or (time.monotonic() < deadline and len(times) < at_most):
        times.append(once())
    return times


def rate(copy: BareCopy, seconds: float) -> float:
    """10^9 bytes a second over a stretch of time, so that both processes copy all the while."""
    begin = time.monotonic()
    count = 0
    while count < _AT_LEAST or time.monotonic() < begin + seconds:
        copy.start()
        copy.finish()
        count += 1
    return count * copy.source.numel() / (time.monotonic() - begin) / 1e9
