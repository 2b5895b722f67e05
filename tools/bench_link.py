"""Measure the links between two processes of this machine, over every transport that runs here.

    python tools/bench_link.py --out runs/links                    # CPU tensors, or two GPUs
    python tools/bench_link.py --transports shm gloo --sizes 8M 32M

One direction is a ping-pong: the time is half a round trip, both ends having the tensor in hand.
Both directions is a send and a receive on each side at once. Contents are compared before anything
is timed. Every transport is measured at one size before the next size, so that ratios come from one
stretch of time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

if not __package__:  # Run as a script, where only tools/ itself would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hetero.pipeline.links import Opening, PipelineLinks, open_links
from hetero.plan import Mesh, Plan
from hetero.transport.base import Link
from hetero.transport.forward import ChannelOptions

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MAX_SECONDS_A_POINT = 2.0


@dataclass(frozen=True)
class Point:
    """One transport at one size."""

    transport: str
    nbytes: int
    one_way_us: float
    one_way_p99_us: float
    one_way_gb_s: float
    both_ways_us: float
    both_ways_gb_s: float
    repeats: int


def parse_size(text: str) -> int:
    unit = _UNITS.get(text[-1].upper(), 1)
    digits = text[:-1] if text[-1].upper() in _UNITS else text
    if not digits.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 64K, 32M or 1G")
    return int(digits) * unit


class Bench:
    """One of the two processes."""

    def __init__(self, rank: int, options: argparse.Namespace, folder: str) -> None:
        self.rank, self.options = rank, options
        self.on_gpu = torch.cuda.device_count() >= 2 and not options.cpu
        self.device = torch.device("cuda", rank) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        self.store = dist.FileStore(f"{folder}/store", 2)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.on_gpu else "gloo",
            store=dist.PrefixStore("group", self.store),
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=120),
        )

    def open(self, transport: str) -> tuple[PipelineLinks, Link]:
        plan = Plan(
            meshes=(Mesh(vendor="cpu", stages=1), Mesh(vendor="nvidia", stages=1)),
            layers=((1,), (1,)),
        )
        opening = Opening(
            boundary_transport=transport,
            device=self.device,
            store=dist.PrefixStore(f"links/{transport}", self.store),
            job="bench",
            timeout=60.0,
            channel=ChannelOptions(ring_bytes=self.options.ring, chunk_bytes=self.options.chunk),
        )
        links = open_links(plan, self.rank, opening)
        link = links.downstream or links.upstream
        if link is None:
            raise RuntimeError("a plan of two stages has a link")
        return links, link

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def ping_pong(self, link: Link, ours: torch.Tensor, theirs: torch.Tensor) -> float:
        """Seconds of half a round trip."""
        begin = time.perf_counter()
        if self.rank == 0:
            link.send(ours)
            link.recv(theirs).wait()
            self.synchronize()
        else:
            link.recv(theirs).wait()
            self.synchronize()
            link.send(ours).wait()
        return (time.perf_counter() - begin) / 2

    def both_ways(self, link: Link, ours: torch.Tensor, theirs: torch.Tensor) -> float:
        begin = time.perf_counter()
        sent, received = link.send(ours), link.recv(theirs)
        received.wait()
        sent.wait()
        self.synchronize()
        return time.perf_counter() - begin

    def repeat(self, step: Callable[[], float], *, swap: bool) -> list[float]:
        """Times of enough repeats, as rank 0 sees them."""
        self.synchronize()
        dist.barrier()
        first = [step() for _ in range(3)]
        wanted = int(_MAX_SECONDS_A_POINT / max(statistics.median(first), 1e-6))
        count = torch.tensor([min(max(wanted, 5), self.options.repeats)])
        dist.broadcast(count, 0)
        times = []
        for _ in range(int(count)):
            if swap:
                dist.barrier()
            times.append(step())
        return times

    def measure(self, transport: str, link: Link, nbytes: int) -> Point:
        generator = torch.Generator().manual_seed(self.rank)
        ours = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        expected = torch.randint(
            0,
            256,
            (nbytes,),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(1 - self.rank),
        ).to(self.device)
        ours, theirs = ours.to(self.device), torch.zeros_like(expected)
        self.both_ways(link, ours, theirs)
        if not torch.equal(theirs, expected):
            raise RuntimeError(f"{transport} changed the bytes of a message of {nbytes}")
        one = self.repeat(lambda: self.ping_pong(link, ours, theirs), swap=False)
        both = self.repeat(lambda: self.both_ways(link, ours, theirs), swap=True)
        if not torch.equal(theirs, expected):
            raise RuntimeError(f"{transport} changed the bytes of a message of {nbytes}")
        middle, both_middle = statistics.median(one), statistics.median(both)
        return Point(
            transport=transport,
            nbytes=nbytes,
            one_way_us=middle * 1e6,
            one_way_p99_us=sorted(one)[min(len(one) - 1, int(len(one) * 0.99))] * 1e6,
            one_way_gb_s=nbytes / middle / 1e9,
            both_ways_us=both_middle * 1e6,
            both_ways_gb_s=2 * nbytes / both_middle / 1e9,
            repeats=len(one),
        )

    def copy_limits(self, nbytes: int) -> list[Point]:
        """What one bare copy of the bytes takes: memory to memory, or GPU to pinned memory."""
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self.on_gpu)
        source = torch.ones(nbytes, dtype=torch.uint8, device=self.device)

        def copy() -> float:
            begin = time.perf_counter()
            host.copy_(source, non_blocking=True)
            self.synchronize()
            return time.perf_counter() - begin

        times = self.repeat(copy, swap=False)
        middle = statistics.median(times)
        name = "bare GPU-to-pinned copy" if self.on_gpu else "bare memory copy"
        rate = nbytes / middle / 1e9
        return [Point(name, nbytes, middle * 1e6, max(times) * 1e6, rate, 0.0, 0.0, len(times))]


def work(rank: int, options: argparse.Namespace, folder: str) -> None:
    if not options.keep_threads:
        torch.set_num_threads(1)
    bench = Bench(rank, options, folder)
    points: list[Point] = []
    names = [name for name in options.transports if bench.on_gpu or name != "nccl"]
    links = {name: bench.open(name) for name in names}
    for nbytes in options.sizes:
        for name, (_, link) in links.items():
            points.append(bench.measure(name, link, nbytes))
        points += bench.copy_limits(nbytes)
    dist.barrier()
    for opened, _ in links.values():
        opened.close()
    if rank == 0:
        report(points, bench, options)
    dist.destroy_process_group()


def report(points: Sequence[Point], bench: Bench, options: argparse.Namespace) -> None:
    device = torch.cuda.get_device_name() if bench.on_gpu else platform.machine() + " CPU"
    record = {
        "device": device,
        "cores": os.cpu_count(),
        "torch": str(torch.__version__),
        "ring_bytes": options.ring,
        "chunk_bytes": options.chunk,
        "points": [asdict(point) for point in points],
    }
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "links.json").write_text(json.dumps(record, indent=1))
    print(
        f"two processes on {device}, ring {options.ring >> 20} MiB, slots {options.chunk >> 10} KiB"
    )
    print(
        f"{'bytes':>12}  {'path':<24}{'one way us':>12}{'p99 us':>10}{'GB/s':>8}{'both GB/s':>11}"
    )
    for point in points:
        both = f"{point.both_ways_gb_s:11.2f}" if point.both_ways_us else f"{'':>11}"
        print(
            f"{point.nbytes:>12}  {point.transport:<24}{point.one_way_us:>12.1f}"
            f"{point.one_way_p99_us:>10.1f}{point.one_way_gb_s:>8.2f}{both}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--transports",
        nargs="+",
        default=["gloo", "tcp", "shm", "nccl"],
        help="nccl is left out where there are not two GPUs",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=parse_size,
        default=[parse_size(s) for s in ("4K", "64K", "1M", "8M", "32M", "128M")],
    )
    parser.add_argument("--repeats", type=int, default=50, help="at most, for each point")
    parser.add_argument("--ring", type=parse_size, default=64 << 20, help="bytes of a link's rings")
    parser.add_argument("--chunk", type=parse_size, default=2 << 20, help="bytes of a slot")
    parser.add_argument("--cpu", action="store_true", help="CPU tensors even where there are GPUs")
    parser.add_argument("--keep-threads", action="store_true", help="leave torch its threads")
    parser.add_argument("--out", default="runs/links")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(options, folder), nprocs=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
