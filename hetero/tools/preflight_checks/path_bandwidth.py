"""What links, and the copies between GPU and host, reach here. Takes seconds.

It measures as hetero perf links does, but less and, as nodes are apart, by one end's watch alone.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import uuid
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hetero.link import PATHS
from hetero.link.base import Link
from hetero.link.nics import Nics, rdma_missing
from hetero.link.open import ChannelOptions
from hetero.pipeline.links import LinkOptions as Opening
from hetero.startup.exchange import Exchange
from hetero.tools.benchmark.limits import FROM_PINNED, TO_PINNED, BareCopy, rate
from hetero.tools.benchmark.link import LinkMeter, LinkPath, Messages, open_between_two
from hetero.tools.benchmark.ranks import Ranks
from hetero.tools.benchmark.record import Options
from hetero.tools.launching.interrupts import children_ignore_interrupts

_SIZES = 4 << 10, 16 << 20
"""Bytes of the messages whose latency, and whose bandwidth, is taken."""
_OPTIONS = Options(seconds_a_point=2.0, repeats=50)
_TIMEOUT = 30.0
_COPY_BYTES, _COPY_SECONDS = 64 << 20, 0.1


@dataclass(frozen=True)
class PathResult:
    """What one way between two processes reached."""

    path: str
    latency_us: float
    """Half a round trip of 4 KiB."""
    there_gb_s: float
    """From the first end to the second, messages of 16 MiB one after another."""
    back_gb_s: float
    both_gb_s: float
    """Each way, while both carry."""
    error: str = ""
    remark: str = ""
    """What `auto` said about the ways that it passed over."""

    def rail_figures(self, *, rails: int = 1) -> dict[str, float]:
        """What a cluster file says of a rail, where the path has so many."""
        one_way = min(self.there_gb_s, self.back_gb_s)
        return {
            "rail_gbits": 8 * one_way / rails,
            "rail_both_ways_gbits": 8 * min(self.both_gb_s, one_way) / rails,
            "rail_latency_us": self.latency_us,
        }


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


def measure_paths(end: End, *, only_chosen: bool = False) -> list[PathResult]:
    """Open and measure what `auto` chooses, then each other path by force. Collective.

    A path that does not open or breaks is reported with its reason. What end 1 returns has only the
    labels and reasons: end 0 has the times.
    """
    every = end.addresses
    chosen, passed_over = _measure(end, _Way("auto", "auto", every))
    if only_chosen:
        return [chosen]
    # `auto` says nothing of RDMA where it took a faster path.
    said = Exchange(end.store, "missing paths", member=end.number, size=2).run(
        {
            "passed over": [text.partition(":")[0] for text in passed_over],
            "lacks rdma": rdma_missing() is not None,
        },
        timeout=_TIMEOUT,
    )
    hopeless = [*said[0]["passed over"]]
    if any(one["lacks rdma"] for one in said):
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


def _measure(end: End, way: _Way) -> tuple[PathResult, tuple[str, ...]]:
    """What a way reached, and what `auto` passed over for it."""
    label = way.label
    passed_over: tuple[str, ...] = ()
    try:
        with ExitStack() as closing:
            link = _open(end, way)
            closing.callback(link.close)
            passed_over = link.passed_over or ()
            if link.transport == "gloo":
                raise RuntimeError(f"no path works ({'; '.join(passed_over)})")
            if way.transport == "auto":
                label = f"auto: {link.transport}"
            words = dist.PrefixStore(f"words/{way.label}", end.store)
            meter = LinkMeter(Ranks(end.number, 2, words, timeout=_TIMEOUT), _OPTIONS)
            small, large = (
                Messages.of(nbytes, rank=end.number, device=end.device) for nbytes in _SIZES
            )
            rates = meter.rates(LinkPath(label, link, end.device), small, large)
            found = PathResult(path=label, remark="; ".join(passed_over), **rates)
            return found, passed_over
    except Exception as error:  # whatever keeps a way from working is what is to be reported
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return PathResult(label, 0.0, 0.0, 0.0, 0.0, error=reason), passed_over


def _open(end: End, way: _Way) -> Link:
    opening = Opening(
        boundary_transport=way.transport,
        device=end.device,
        store=dist.PrefixStore(way.label, end.store),
        secret=end.secret,
        timeout=_TIMEOUT,
        channel=ChannelOptions(nics=Nics(way.addresses)),
    )
    return open_between_two(end.number, opening)


def measure_alone(*, only_chosen: bool = False) -> list[PathResult]:
    """The ways between two processes of this node, for which a second one is started.

    The first is what `auto` chooses.
    """
    with tempfile.TemporaryDirectory() as folder:
        secret = uuid.uuid4().hex
        spawn = multiprocessing.get_context("spawn")
        with children_ignore_interrupts():
            pool = spawn.Pool(1)
        # Leaving it ends the other process, whatever that still waits for.
        with pool:
            other = pool.apply_async(_one_end, (1, folder, secret, only_chosen))
            results = _one_end(0, folder, secret, only_chosen)
            other.get(timeout=_TIMEOUT)
    return results


def _one_end(number: int, folder: str, secret: str, only_chosen: bool) -> list[PathResult]:
    end = End(
        number=number,
        store=dist.FileStore(f"{folder}/store", 2),
        secret=secret,
        addresses=("127.0.0.1",),
        device=own_device(number),
    )
    return measure_paths(end, only_chosen=only_chosen)


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
        ways = (BareCopy(TO_PINNED, there, host, True), BareCopy(FROM_PINNED, host, there, True))
        results.append(CopyResult(gpu, *(rate(way, _COPY_SECONDS) for way in ways)))
    return results
