"""Times one path at one size: latency, bandwidth, both directions, after idling, CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from hetero.tools.link_bench.bench_record import Options, Point, Timing, limit_of, queue_depth
from hetero.tools.link_bench.measured_paths import LinkPath, Path, blocking_synchronize, synchronize
from hetero.tools.link_bench.two_ranks import Both, Pair

Sample = TypeVar("Sample")

IDLE_SECONDS = 0.05
# How a point's time is shared out.
_PING_PONG, _BOTH, _QUEUED, _AFTER_IDLE, _CPU = 0.2, 0.18, 0.17, 0.4, 0.05
_AT_LEAST = 3
# Odd, so that multiplying by them only permutes the 64-bit words.
_SPREAD, _BY_SENDER, _BY_SIZE = 0x1E3779B97F4A7C15, 0xD1342543DE82EF95, 0xAF251AF3B0F025B5


@dataclass(frozen=True)
class Messages:
    """What one process sends and expects at one size, and where it receives."""

    nbytes: int
    ours: torch.Tensor
    expected: torch.Tensor
    theirs: torch.Tensor

    @classmethod
    def of(cls, nbytes: int, *, rank: int, device: torch.device) -> Messages:
        ours, expected = (pattern(nbytes, sender=r, device=device) for r in (rank, 1 - rank))
        return cls(nbytes, ours, expected, torch.zeros_like(ours))


def pattern(nbytes: int, *, sender: int, device: torch.device) -> torch.Tensor:
    """Bytes of which no aligned word occurs twice, and that differ by sender and by size."""
    words = torch.arange((nbytes + 7) // 8, dtype=torch.int64, device=device)
    words *= _SPREAD
    words += _as_signed((sender + 1) * _BY_SENDER + nbytes * _BY_SIZE)
    return words.view(torch.uint8)[:nbytes]


def _as_signed(word: int) -> int:
    """The 64-bit word of the same bits, as torch's integers are."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


@dataclass(frozen=True)
class Rates:
    """What a link reached, in short. `there` is from rank 0 to rank 1, `back` the other way."""

    latency_us: float
    there_gb_s: float
    back_gb_s: float
    both_gb_s: float
    """Each way, while both carry."""


class Meter:
    """One of the two processes, measuring together with the other."""

    def __init__(self, pair: Pair, options: Options) -> None:
        self._pair = pair
        self._options = options

    def measure(self, path: Path, messages: Messages) -> Point:
        """All figures of a path at a size. Raises ExchangeError in both processes alike."""
        self.check(path, messages)
        nbytes = messages.nbytes
        latency = self._ping_pong(path, messages)
        both = Timing.of(self._repeat(lambda: self._exchange(path, messages), budget=_BOTH).rank0)
        depth = queue_depth(nbytes)
        queued = self._one_way(path, messages, depth=depth, budget=_QUEUED)
        after_idle = self._one_way(path, messages, depth=1, budget=_AFTER_IDLE, idle=IDLE_SECONDS)
        cpu = self._cpu_seconds(path, messages, depth)
        self._pair.together(lambda: self._compare(path, messages))
        bandwidth, bandwidth_p99 = queued.gb_s(depth * nbytes)
        both_bandwidth, both_p99 = both.gb_s(2 * nbytes)
        is_link = isinstance(path, LinkPath)
        return Point(
            path=path.name,
            is_limit=not is_link,
            nbytes=nbytes,
            latency_us=latency.median * 1e6,
            latency_p99_us=latency.p99 * 1e6,
            ping_pong_gb_s=latency.gb_s(nbytes)[0],
            after_idle_us=after_idle.median * 1e6,
            after_idle_p99_us=after_idle.p99 * 1e6,
            bandwidth_gb_s=bandwidth,
            bandwidth_p99_gb_s=bandwidth_p99,
            both_gb_s=both_bandwidth,
            both_p99_gb_s=both_p99,
            cpu_send_us=cpu.rank0 * 1e6,
            cpu_recv_us=cpu.rank1 * 1e6,
            queue_depth=depth,
            latency_samples=latency.samples,
            limit=limit_of(
                path.link.transport,
                on_gpu=path.device.type == "cuda",
                connections=self._options.connections,
            )
            if isinstance(path, LinkPath)
            else None,
        )

    def rates(self, path: Path, small: Messages, large: Messages) -> Rates:
        """Latency of one size, bandwidth of another, between two hosts as well.

        The watch is rank 0's alone: two hosts share no clock. Raises ExchangeError in both alike.
        """
        self.check(path, large)
        latency = self._ping_pong(path, small)
        depth = queue_depth(large.nbytes)
        there, back = (
            self._repeat(self._streamed(path, large, depth, sends=sends), budget=_QUEUED)
            for sends in (self._pair.leads, not self._pair.leads)
        )
        both = self._repeat(lambda: self._exchange(path, large), budget=_BOTH)
        nbytes = depth * large.nbytes
        return Rates(
            latency_us=latency.median * 1e6,
            there_gb_s=Timing.of(there.rank0).gb_s(nbytes)[0],
            back_gb_s=Timing.of(back.rank0).gb_s(nbytes)[0],
            both_gb_s=Timing.of(both.rank0).gb_s(large.nbytes)[0],
        )

    def _streamed(
        self, path: Path, messages: Messages, depth: int, *, sends: bool
    ) -> Callable[[], float]:
        """Seconds for queued messages one way and a small answer."""
        token = torch.ones(8, dtype=torch.uint8, device=path.device)
        answer = torch.zeros_like(token)
        synchronize(path.device)

        def step() -> float:
            begin = time.monotonic()
            if sends:
                path.send_all(messages.ours, depth)
                path.recv(answer)
            else:
                path.recv_all(messages.theirs, depth)
                path.send(token)
            return time.monotonic() - begin

        return step

    def check(self, path: Path, messages: Messages) -> None:
        """A message each way, every byte compared."""

        def step() -> None:
            messages.theirs.zero_()
            synchronize(path.device)
            path.exchange(messages.ours, messages.theirs)

        self._pair.together(step)
        self._pair.together(lambda: self._compare(path, messages))

    def _compare(self, path: Path, messages: Messages) -> None:
        if not torch.equal(messages.theirs, messages.expected):
            raise RuntimeError(
                f"rank {self._pair.rank} received a message of {messages.nbytes} bytes that "
                f"{path.name} had changed"
            )

    def _ping_pong(self, path: Path, messages: Messages) -> Timing:
        def step() -> float:
            begin = time.monotonic()
            if self._pair.leads:
                path.send(messages.ours)
                path.recv(messages.theirs)
            else:
                path.recv(messages.theirs)
                path.send(messages.ours)
            return (time.monotonic() - begin) / 2

        return Timing.of(self._repeat(step, budget=_PING_PONG).rank0)

    def _exchange(self, path: Path, messages: Messages) -> float:
        # No barrier: neither side can end a step before the other has begun it.
        begin = time.monotonic()
        path.exchange(messages.ours, messages.theirs)
        return time.monotonic() - begin

    def _one_way(
        self, path: Path, messages: Messages, *, depth: int, budget: float, idle: float = 0.0
    ) -> Timing:
        """Seconds from rank 0's first send to rank 1 having the last of `depth` messages.

        Both processes run on one host, whose monotonic clock they share.
        """
        step = self._round(path, messages, depth=depth, idle=idle)
        stamps = self._repeat(step, budget=budget)
        return Timing.of([e - b for b, e in zip(stamps.rank0, stamps.rank1, strict=True)])

    def _round(
        self, path: Path, messages: Messages, *, depth: int, idle: float = 0.0
    ) -> Callable[[], float]:
        """Queued messages to rank 1 and a small answer; gives the time of rank 0's begin or of
        rank 1's end."""
        token = torch.ones(8, dtype=torch.uint8, device=path.device)
        answer = torch.zeros_like(token)
        synchronize(path.device)

        def step() -> float:
            if self._pair.leads:
                time.sleep(idle)
                begin = time.monotonic()
                path.send_all(messages.ours, depth)
                path.recv(answer)
                return begin
            path.recv_all(messages.theirs, depth)
            end = time.monotonic()
            path.send(token)
            return end

        return step

    def _cpu_seconds(self, path: Path, messages: Messages, depth: int) -> Both[float]:
        """CPU time of each process for one queued message, waiting for the device asleep."""
        step = self._round(path, messages, depth=depth)

        def timed() -> tuple[float, float]:
            begin = time.process_time()
            stamp = step()
            return stamp, time.process_time() - begin

        with _asleep(path):
            used = self._repeat(timed, budget=_CPU)
        return Both(
            *(sum(cpu for _, cpu in side) / len(side) / depth for side in (used.rank0, used.rank1))
        )

    def _repeat(self, step: Callable[[], Sample], *, budget: float) -> Both[list[Sample]]:
        """Samples of a step, as many as its share of the point's time allows.

        The first warms up and is dropped; the second says how many follow.
        """

        def first() -> tuple[Sample, float]:
            step()
            begin = time.monotonic()
            return step(), time.monotonic() - begin

        begun = self._pair.together(first)
        seconds = max(begun.rank0[1], begun.rank1[1], 1e-6)
        wanted = int(budget * self._options.seconds_a_point / seconds)
        count = min(max(wanted, _AT_LEAST), self._options.repeats) - 1
        rest = self._pair.together(lambda: [step() for _ in range(count)])
        return Both([begun.rank0[0], *rest.rank0], [begun.rank1[0], *rest.rank1])


@contextmanager
def _asleep(path: Path) -> Iterator[None]:
    if not isinstance(path, LinkPath):
        yield
        return
    path.wait_for_device = blocking_synchronize
    try:
        yield
    finally:
        path.wait_for_device = synchronize
