"""A link between two ranks: how it is opened, and what one message size costs over it.

A Path is what is measured: a link of ours, or bare sockets (limits.py). Both ranks hold one end.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TypedDict

import torch
import torch.distributed as dist

from hetero.errors import ExchangeError
from hetero.link.base import Link
from hetero.link.open import ChannelOptions
from hetero.pipeline.links import LinkOptions as Opening
from hetero.pipeline.links import open_links
from hetero.plan import Mesh, Plan
from hetero.tools.benchmark.ranks import Ranks, synchronize
from hetero.tools.benchmark.record import (
    LinkFacts,
    LinkOptions,
    Options,
    Point,
    Timing,
    queue_depth,
)

IDLE_SECONDS = 0.05
# How a point's time is shared out.
_PING_PONG, _BOTH, _QUEUED, _AFTER_IDLE, _CPU = 0.2, 0.18, 0.17, 0.4, 0.05
# Odd, so that multiplying by them only permutes the 64-bit words.
_SPREAD, _BY_SENDER, _BY_SIZE = 0x1E3779B97F4A7C15, 0xD1342543DE82EF95, 0xAF251AF3B0F025B5
_PLAN = Plan(meshes=(Mesh("cpu", stages=1), Mesh("nvidia", stages=1)), layers=((1,), (1,)))
_PLAN_OF_ONE_MESH = Plan(meshes=(Mesh("nvidia", stages=2),), layers=((1,), (1,)))


class Path(ABC):
    """One end of something that carries tensors both ways, in order.

    What receives returns once the bytes are really there: on a GPU after a synchronisation, because
    a link's `wait` may only order the stream.
    """

    name: str
    device: torch.device
    """Where the tensors lie."""

    @abstractmethod
    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor; may return before it has left. It must not change meanwhile."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor) -> None:
        """Receive the next message into a tensor; returns when it is there."""

    @abstractmethod
    def exchange(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Send and receive at once; returns when both have ended."""

    @abstractmethod
    def send_all(self, tensor: torch.Tensor, count: int) -> None:
        """Send a tensor so many times, back to back, and wait for all once."""

    @abstractmethod
    def recv_all(self, tensor: torch.Tensor, count: int) -> None:
        """Receive so many messages into one tensor, back to back, and wait for all once."""

    @abstractmethod
    def close(self) -> None:
        """Release what the path holds."""


class LinkPath(Path):
    """A link of ours, over any transport."""

    def __init__(self, name: str, link: Link, device: torch.device) -> None:
        self.name, self.device = name, device
        self.link = link
        self.waits_asleep = False
        """Whether waiting for the device costs no CPU time; a driver may spin."""

    def send(self, tensor: torch.Tensor) -> None:
        self.link.send(tensor)

    def recv(self, tensor: torch.Tensor) -> None:
        self.link.recv(tensor).wait()
        self._arrive()

    def exchange(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        sent, received = self.link.send(ours), self.link.recv(theirs)
        received.wait()
        sent.wait()
        self._arrive()

    def send_all(self, tensor: torch.Tensor, count: int) -> None:
        for transfer in [self.link.send(tensor) for _ in range(count)]:
            transfer.wait()

    def recv_all(self, tensor: torch.Tensor, count: int) -> None:
        for transfer in [self.link.recv(tensor) for _ in range(count)]:
            transfer.wait()
        self._arrive()

    def close(self) -> None:
        self.link.close()

    def _arrive(self) -> None:
        if self.waits_asleep and self.device.type == "cuda":
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(self.device))
            event.synchronize()
        else:
            synchronize(self.device)
        # A link that only orders streams may learn of a failure after its `wait`.
        self.link.check()


@dataclass(frozen=True)
class Messages:
    """What one rank sends and expects at one size, and where it receives."""

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
    word = (sender + 1) * _BY_SENDER + nbytes * _BY_SIZE
    words += (word + (1 << 63)) % (1 << 64) - (1 << 63)  # the same bits, as torch's integers are
    return words.view(torch.uint8)[:nbytes]


class Rates(TypedDict):
    """What a path reached, in short: half a round trip, and GB/s from rank 0, to it, each way."""

    latency_us: float
    there_gb_s: float
    back_gb_s: float
    both_gb_s: float
    """Each way, while both carry."""


class LinkMeter:
    """One of two ranks that measure paths together. Raises ExchangeError in both alike."""

    def __init__(self, ranks: Ranks, options: Options) -> None:
        self._ranks, self._options = ranks, options

    def measure(self, path: Path, messages: Messages) -> Point:
        """All figures of a path at a size, on one host, whose monotonic clock both ranks share."""
        self.check(path, messages)
        nbytes = messages.nbytes
        depth = queue_depth(nbytes)
        latency = self._ping_pong(path, messages)
        both = self._both(path, messages)
        queued = self._one_way(path, messages, depth=depth, share=_QUEUED).over(depth)
        after_idle = self._one_way(path, messages, share=_AFTER_IDLE, idle=IDLE_SECONDS)
        cpu = self._cpu_seconds(path, messages, depth)
        self._ranks.together(lambda: _compare(path, messages, self._ranks.rank))
        return Point(
            name=path.name,
            is_limit=not isinstance(path, LinkPath),
            nbytes=nbytes,
            latency_us=latency.median * 1e6,
            latency_p99_us=latency.p99 * 1e6,
            time_us=queued.median * 1e6,
            time_p99_us=queued.p99 * 1e6,
            after_idle_us=after_idle.median * 1e6,
            after_idle_p99_us=after_idle.p99 * 1e6,
            both_gb_s=2 * nbytes / both / 1e9,
            cpu_send_us=cpu[0] * 1e6,
            cpu_recv_us=cpu[1] * 1e6,
            queue_depth=depth,
            samples=latency.samples,
        )

    def rates(self, path: Path, small: Messages, large: Messages) -> Rates:
        """Of small and of large messages, between two hosts as well.

        The watch is rank 0's alone: two hosts share no clock.
        """
        self.check(path, large)
        latency = self._ping_pong(path, small)
        depth = queue_depth(large.nbytes)
        ways = [
            Timing.of(self._repeat(self._round(path, large, depth, sender=rank), share=_QUEUED))
            for rank in (0, 1)
        ]
        there, back = (depth * large.nbytes / way.median / 1e9 for way in ways)
        return {
            "latency_us": latency.median * 1e6,
            "there_gb_s": there,
            "back_gb_s": back,
            "both_gb_s": large.nbytes / self._both(path, large) / 1e9,
        }

    def check(self, path: Path, messages: Messages) -> None:
        """A message each way, every byte compared."""

        def step() -> None:
            messages.theirs.zero_()
            synchronize(path.device)
            path.exchange(messages.ours, messages.theirs)

        self._ranks.together(step)
        self._ranks.together(lambda: _compare(path, messages, self._ranks.rank))

    def _ping_pong(self, path: Path, messages: Messages) -> Timing:
        def step() -> float:
            begin = time.monotonic()
            if self._ranks.leads:
                path.send(messages.ours)
                path.recv(messages.theirs)
            else:
                path.recv(messages.theirs)
                path.send(messages.ours)
            return (time.monotonic() - begin) / 2

        return Timing.of(self._repeat(step, share=_PING_PONG))

    def _both(self, path: Path, messages: Messages) -> float:
        """Seconds of a message each way at once."""

        def step() -> float:
            # No barrier: neither side can end a step before the other has begun it.
            begin = time.monotonic()
            path.exchange(messages.ours, messages.theirs)
            return time.monotonic() - begin

        return Timing.of(self._repeat(step, share=_BOTH)).median

    def _one_way(
        self, path: Path, messages: Messages, *, share: float, depth: int = 1, idle: float = 0.0
    ) -> Timing:
        """Seconds from rank 0's first send to rank 1 having the last of `depth` messages."""
        stamps: list[float] = []
        step = self._round(path, messages, depth, idle=idle, stamps=stamps)
        count = len(self._repeat(step, share=share))
        begins, ends = self._ranks.together(lambda: stamps[-count:])
        return Timing.of([end - begin for begin, end in zip(begins, ends, strict=True)])

    def _cpu_seconds(self, path: Path, messages: Messages, depth: int) -> list[float]:
        """CPU time of each rank for one queued message, waiting for the device asleep."""
        step = self._round(path, messages, depth)

        def timed() -> float:
            begin = time.process_time()
            step()
            return time.process_time() - begin

        if isinstance(path, LinkPath):
            path.waits_asleep = True
        try:
            used = self._repeat(timed, share=_CPU)
        finally:
            if isinstance(path, LinkPath):
                path.waits_asleep = False
        return self._ranks.together(lambda: sum(used) / len(used) / depth)

    def _round(
        self,
        path: Path,
        messages: Messages,
        depth: int,
        *,
        sender: int = 0,
        idle: float = 0.0,
        stamps: list[float] | None = None,
    ) -> Callable[[], float]:
        """Seconds for queued messages one way and a small answer.

        `stamps` gets when the sender began and when the receiver had them all.
        """
        token = torch.ones(8, dtype=torch.uint8, device=path.device)
        answer = torch.zeros_like(token)
        synchronize(path.device)
        stamps = [] if stamps is None else stamps

        def step() -> float:
            if self._ranks.rank == sender:
                time.sleep(idle)
                begin = time.monotonic()
                stamps.append(begin)
                path.send_all(messages.ours, depth)
                path.recv(answer)
            else:
                begin = time.monotonic()
                path.recv_all(messages.theirs, depth)
                stamps.append(time.monotonic())
                path.send(token)
            return time.monotonic() - begin

        return step

    def _repeat(self, step: Callable[[], float], *, share: float) -> list[float]:
        seconds = share * self._options.seconds_a_point
        return self._ranks.repeat(step, seconds=seconds, at_most=self._options.repeats)


def _compare(path: Path, messages: Messages, rank: int) -> None:
    if not torch.equal(messages.theirs, messages.expected):
        raise RuntimeError(
            f"rank {rank} received a message of {messages.nbytes} bytes that {path.name} had "
            "changed"
        )


def open_between_two(rank: int, opening: Opening) -> Link:
    """A link between two processes that are one stage each. Collective between them.

    `nccl` crosses no boundary: it is measured as the vendor's library inside a mesh.
    """
    plan = _PLAN_OF_ONE_MESH if opening.boundary_transport == "nccl" else _PLAN
    (link,) = open_links(plan, rank, opening).all()
    return link


class LinkOpener:
    """Opens the transports of a run, one after another, and sees what each costs in memory."""

    def __init__(
        self, ranks: Ranks, *, options: LinkOptions, store: dist.Store, device: torch.device
    ) -> None:
        self._ranks, self._options = ranks, options
        self._store, self._device = store, device
        self._meter = LinkMeter(ranks, options)
        # Kept for all openings: were it freed, the next link's ring would take its place unseen.
        nbytes = max(options.ring_bytes // 4, 8)
        self._messages = Messages.of(nbytes, rank=ranks.rank, device=device)

    def open(self, name: str) -> tuple[LinkPath, LinkFacts]:
        """Open and try a transport. Raises ExchangeError in both ranks when either cannot."""
        if name == "nccl":
            self._ranks.together(self._require_gpu)
        before = self._ranks.together(lambda: (host_bytes(), device_bytes(self._device)))
        begin = time.monotonic()
        opened: list[Link] = []
        try:
            self._ranks.together(lambda: opened.append(self._link(name)))
            seconds = time.monotonic() - begin
            path = LinkPath(name, opened[0], self._device)
            for _ in range(3):
                # Half of a direction's ring each: every slot has been used afterwards.
                self._meter.check(path, self._messages)
        except ExchangeError:
            for link in opened:
                link.close()
            raise
        after = self._ranks.together(lambda: (host_bytes(), device_bytes(self._device)))
        host, device = (
            _growth(*([one[kind] for one in when] for when in (before, after))) for kind in (0, 1)
        )
        facts = LinkFacts(
            path=name,
            transport=path.link.transport,
            host_bytes=host,
            device_bytes=device or 0,
            open_seconds=seconds,
            passed_over=opened[0].passed_over or (),
        )
        return path, facts

    def _require_gpu(self) -> None:
        # Making its group on a CPU fails too, but not with words that help.
        if self._device.type != "cuda":
            raise RuntimeError("it needs two GPUs, one for each process")

    def _link(self, name: str) -> Link:
        opening = Opening(
            boundary_transport=name,
            vendor_backend="nccl",
            device=self._device,
            store=dist.PrefixStore(f"links/{name}", self._store),
            secret="bench",
            timeout=self._options.timeout,
            channel=ChannelOptions(
                ring_bytes=self._options.ring_bytes,
                chunk_bytes=self._options.chunk_bytes,
                connections=self._options.connections,
            ),
        )
        return open_between_two(self._ranks.rank, opening)


def host_bytes(rollup: FilePath = FilePath("/proc/self/smaps_rollup")) -> int | None:
    """Memory of this process, what it shares with the other counted half; None if not told.

    Only memory without a file counts: what libraries hold depends on who else has them loaded.
    """
    try:
        found = re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", rollup.read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * sum(int(kib) for kib in found) if found else None


def device_bytes(device: torch.device) -> int:
    """Memory in use on a GPU; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def _growth(before: Sequence[int | None], after: Sequence[int | None]) -> int | None:
    """Of both ranks together; None where one does not know."""
    known = [count for count in (*before, *after) if count is not None]
    if len(known) < len(before) + len(after):
        return None
    return max(sum(known[len(before) :]) - sum(known[: len(before)]), 0)
