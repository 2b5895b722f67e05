"""Opens a transport between the two processes, and sees what it costs in memory."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hetero.errors import ExchangeError
from hetero.link.base import Link
from hetero.link.open import ChannelOptions
from hetero.pipeline.links import LinkOptions, open_links
from hetero.plan import Mesh, Plan
from hetero.tools.link_bench.bench_record import LinkFacts, Options
from hetero.tools.link_bench.measured_paths import LinkPath
from hetero.tools.link_bench.measured_points import Messages, Meter
from hetero.tools.link_bench.two_ranks import Both, Pair

_PLAN = Plan(meshes=(Mesh("cpu", stages=1), Mesh("nvidia", stages=1)), layers=((1,), (1,)))
_PLAN_OF_ONE_MESH = Plan(meshes=(Mesh("nvidia", stages=2),), layers=((1,), (1,)))


@dataclass(frozen=True)
class _Memory:
    host_bytes: int | None
    device_bytes: int


class Opener:
    """One of the two processes."""

    def __init__(
        self, pair: Pair, *, options: Options, store: dist.Store, device: torch.device
    ) -> None:
        self._pair, self._options = pair, options
        self._store, self._device = store, device
        self._meter = Meter(pair, options)
        # Kept for all openings: were it freed, the next link's ring would take its place unseen.
        self._messages = Messages.of(max(options.ring_bytes // 4, 8), rank=pair.rank, device=device)

    def open(self, name: str) -> tuple[LinkPath, LinkFacts]:
        """Open and try a transport. Raises ExchangeError in both processes when either cannot."""
        if name == "nccl":
            self._pair.together(self._require_gpu)
        before = self._pair.together(self._memory)
        begin = time.monotonic()
        opened: list[Link] = []
        try:
            self._pair.together(lambda: opened.append(self._link(name)))
            seconds = time.monotonic() - begin
            path = LinkPath(name, opened[0], self._device)
            for _ in range(3):
                # Half of a direction's ring each: every slot has been used afterwards.
                self._meter.check(path, self._messages)
        except ExchangeError:
            for link in opened:
                link.close()
            raise
        host, device = _growth(before, self._pair.together(self._memory))
        facts = LinkFacts(
            path=name,
            transport=path.link.transport,
            host_bytes=host,
            device_bytes=device,
            open_seconds=seconds,
            passed_over=opened[0].passed_over or (),
        )
        return path, facts

    def _require_gpu(self) -> None:
        # Making its group on a CPU fails too, but not with words that help.
        if self._device.type != "cuda":
            raise RuntimeError("it needs two GPUs, one for each process")

    def _link(self, name: str) -> Link:
        opening = LinkOptions(
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
        return open_between_two(self._pair.rank, opening)

    def _memory(self) -> _Memory:
        host = host_bytes()
        if self._device.type != "cuda":
            return _Memory(host, 0)
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return _Memory(host, total - free)


def open_between_two(rank: int, opening: LinkOptions) -> Link:
    """A link between two processes that are one stage each. Collective between them.

    `nccl` crosses no boundary: it is measured as the vendor's library inside a mesh.
    """
    plan = _PLAN_OF_ONE_MESH if opening.boundary_transport == "nccl" else _PLAN
    (link,) = open_links(plan, rank, opening).all()
    return link


def host_bytes(rollup: Path = Path("/proc/self/smaps_rollup")) -> int | None:
    """Memory of this process, what it shares with the other counted half; None if not told.

    Only memory without a file counts: what libraries hold depends on who else has them loaded.
    """
    try:
        found = re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", rollup.read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * sum(int(kib) for kib in found) if found else None


def _growth(before: Both[_Memory], after: Both[_Memory]) -> tuple[int | None, int]:
    """Host and device bytes, of both processes together."""
    then, now = (before.rank0, before.rank1), (after.rank0, after.rank1)
    device = sum(m.device_bytes for m in now) - sum(m.device_bytes for m in then)
    hosts_then = [m.host_bytes for m in then if m.host_bytes is not None]
    hosts_now = [m.host_bytes for m in now if m.host_bytes is not None]
    if len(hosts_then) + len(hosts_now) < len(then) + len(now):
        return None, max(device, 0)
    return max(sum(hosts_now) - sum(hosts_then), 0), max(device, 0)
