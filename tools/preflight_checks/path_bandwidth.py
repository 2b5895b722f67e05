"""What the project's own links, and the copies between GPU and host, reach here. Takes seconds."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hetero.interrupts import children_ignore_interrupts
from hetero.link.base import Link
from hetero.link.names import PATHS
from hetero.link.open import ChannelOptions
from hetero.link.rdma_ports import why_no_rdma
from hetero.pipeline.links import LinkOptions, PipelineLinks, open_links
from hetero.plan import Mesh, Plan

_SMALL, _LARGE = 4 << 10, 16 << 20
_PING_PONGS = 50
_SECONDS_A_DIRECTION = 0.4
_MOST_MESSAGES = 64
_TIMEOUT = 30.0
_COPY_BYTES, _COPIES = 64 << 20, 8


@dataclass(frozen=True)
class PathResult:
    """What one way between two processes reached."""

    path: str
    latency_us: float
    """Half a round trip of 4 KiB."""
    there_gb_s: float
    """From the first end to the second, messages of 16 MiB one after another."""
    back_gb_s: float
    error: str = ""
    remark: str = ""
    """What `auto` said about the ways that it passed over."""


@dataclass(frozen=True)
class CopyResult:
    """What copies between one GPU and pinned host memory reached, in GB/s."""

    gpu: int
    to_host: float
    to_gpu: float


@dataclass(frozen=True)
class End:
    """One of the two processes that measure together."""

    number: int
    """0 or 1. End 0 holds the watch."""
    store: dist.Store
    """Of these two processes alone."""
    secret: str
    addresses: tuple[str, ...]
    """This end's addresses, one a rail, as many as the other end has."""
    device: torch.device


@dataclass(frozen=True)
class _Way:
    """One thing to measure: a label, what is asked of `open_links`, and this end's addresses."""

    label: str
    transport: str
    addresses: tuple[str, ...]


def measure_paths(end: End) -> list[PathResult]:
    """Open and measure what `auto` chooses, then each other path by force. Collective.

    A path that does not open or breaks is reported with its reason. What end 1 returns has only the
    labels and reasons: end 0 has the times.
    """
    every = end.addresses
    chosen, passed_over = _measure(end, _Way("auto", "auto", every))
    if end.number == 0:
        end.store.set("passed over", json.dumps([text.partition(":")[0] for text in passed_over]))
    end.store.wait(["passed over"], timedelta(seconds=_TIMEOUT))
    hopeless = json.loads(end.store.get("passed over"))
    if _either_lacks_rdma(end):
        hopeless += ["verbs", "verbs-host"]
    ways: list[_Way] = []
    for path in PATHS:
        if path in hopeless:
            continue
        if path == "tcp" and len(every) > 1:
            ways += [_Way(f"tcp {i + 1}", path, (address,)) for i, address in enumerate(every)]
        if chosen.error or chosen.path != f"auto: {path}":
            ways.append(_Way(path, path, every))
    return [chosen, *(_measure(end, way)[0] for way in ways)]


def _either_lacks_rdma(end: End) -> bool:
    """`auto` says nothing of paths that are slower than the one it took."""
    end.store.set(f"lacks rdma {end.number}", json.dumps(why_no_rdma() is not None))
    keys = [f"lacks rdma {number}" for number in (0, 1)]
    end.store.wait(keys, timedelta(seconds=_TIMEOUT))
    return any(json.loads(end.store.get(key)) for key in keys)


def _measure(end: End, way: _Way) -> tuple[PathResult, tuple[str, ...]]:
    """What a way reached, and what `auto` passed over for it."""
    label = way.label
    passed_over: tuple[str, ...] = ()
    try:
        links = _open(end, way)
        with ExitStack() as closing:
            closing.callback(links.close)
            passed_over = tuple(reason for c in links.choices for reason in c.rejected)
            link = links.downstream or links.upstream
            if link is None or link.transport == "gloo":
                raise RuntimeError(f"no path works ({'; '.join(passed_over)})")
            if way.transport == "auto":
                label = f"auto: {link.transport}"
            return _Timing(end, link).result(label, "; ".join(passed_over)), passed_over
    except Exception as error:  # whatever keeps a way from working is what is to be reported
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return PathResult(label, 0.0, 0.0, 0.0, error=reason), passed_over


def _open(end: End, way: _Way) -> PipelineLinks:
    plan = Plan(
        meshes=(Mesh(vendor="cpu", stages=1), Mesh(vendor="nvidia", stages=1)),
        layers=((1,), (1,)),
    )
    opening = LinkOptions(
        boundary_transport=way.transport,
        device=end.device,
        store=dist.PrefixStore(way.label, end.store),
        job=end.secret,
        timeout=_TIMEOUT,
        channel=ChannelOptions(addresses=way.addresses),
    )
    return open_links(plan, end.number, opening)


class _Timing:
    """Moves messages over one link. Both ends run the same steps; end 0 times them."""

    def __init__(self, end: End, link: Link) -> None:
        self._end, self._link = end, link
        self._leads = end.number == 0
        self._word = torch.zeros(1, dtype=torch.uint8, device=end.device)

    def result(self, label: str, remark: str) -> PathResult:
        self._check_contents()
        small = torch.zeros(_SMALL, dtype=torch.uint8, device=self._end.device)
        times = [self._round_trip(small) for _ in range(_PING_PONGS)]
        large = torch.zeros(_LARGE, dtype=torch.uint8, device=self._end.device)
        self._round_trip(large)
        count = self._agree_on(_SECONDS_A_DIRECTION / max(self._round_trip(large) / 2, 1e-6))
        there, back = (self._stream(large, count, forward=way) for way in (True, False))
        total = count * _LARGE / 1e9
        return PathResult(
            path=label,
            latency_us=statistics.median(times) / 2 * 1e6,
            there_gb_s=total / there,
            back_gb_s=total / back,
            remark=remark,
        )

    def _check_contents(self) -> None:
        generator = torch.Generator().manual_seed(7)
        expected = torch.randint(0, 256, (_LARGE + 1,), dtype=torch.uint8, generator=generator)
        expected = expected.to(self._end.device)
        received = torch.zeros_like(expected)
        sent = self._link.send(expected)
        self._receive(received)
        sent.wait()
        if not torch.equal(expected, received):
            raise RuntimeError("bytes arrived changed; do not train over this path")

    def _receive(self, tensor: torch.Tensor) -> None:
        self._link.recv(tensor).wait()
        if self._end.device.type == "cuda":
            torch.cuda.synchronize(self._end.device)

    def _round_trip(self, tensor: torch.Tensor) -> float:
        begin = time.perf_counter()
        if self._leads:
            self._link.send(tensor)
            self._receive(tensor)
        else:
            self._receive(tensor)
            self._link.send(tensor)
        return time.perf_counter() - begin

    def _agree_on(self, count: float) -> int:
        """End 0's number of messages, told to end 1."""
        if self._leads:
            self._word.fill_(int(min(max(count, 2), _MOST_MESSAGES)))
            self._link.send(self._word).wait()
        else:
            self._receive(self._word)
        return int(self._word.item())

    def _stream(self, tensor: torch.Tensor, count: int, *, forward: bool) -> float:
        """Seconds for `count` messages in one direction, and a word back."""
        begin = time.perf_counter()
        if self._leads == forward:
            works = [self._link.send(tensor) for _ in range(count)]
            self._receive(self._word)
            for work in works:
                work.wait()
        else:
            for _ in range(count):
                self._receive(tensor)
            self._link.send(self._word).wait()
        return time.perf_counter() - begin


def measure_alone() -> list[PathResult]:
    """The ways between two processes of this node, for which a second one is started."""
    with tempfile.TemporaryDirectory() as folder:
        secret = uuid.uuid4().hex
        spawn = multiprocessing.get_context("spawn")
        with children_ignore_interrupts():
            pool = spawn.Pool(1)
        # Leaving it ends the other process, whatever that still waits for.
        with pool:
            other = pool.apply_async(_one_end, (1, folder, secret))
            results = _one_end(0, folder, secret)
            other.get(timeout=_TIMEOUT)
    return results


def _one_end(number: int, folder: str, secret: str) -> list[PathResult]:
    end = End(
        number=number,
        store=dist.FileStore(f"{folder}/store", 2),
        secret=secret,
        addresses=("127.0.0.1",),
        device=own_device(number),
    )
    return measure_paths(end)


def own_device(number: int) -> torch.device:
    """The GPU of a node's process, or the CPU where there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return torch.device("cpu")
    device = torch.device("cuda", number % count)
    torch.cuda.set_device(device)
    return device


def measure_copies() -> list[CopyResult]:
    """Every visible GPU's copies to and from pinned host memory, one GPU after another."""
    results = []
    for gpu in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        host = torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{gpu}")
        results.append(CopyResult(gpu, _copy_rate(host, there, gpu), _copy_rate(there, host, gpu)))
    return results


def _copy_rate(target: torch.Tensor, source: torch.Tensor, gpu: int) -> float:
    times = []
    for _ in range(_COPIES):
        torch.cuda.synchronize(gpu)
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(gpu)
        times.append(time.perf_counter() - begin)
    return _COPY_BYTES / statistics.median(times) / 1e9
