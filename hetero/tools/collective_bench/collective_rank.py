"""One rank of a run: opens every backend, measures all of them at one size before the next."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

import hetero
from hetero.collectives.backend import INSTEAD_OF_VARIABLE
from hetero.device.choose_device import choose_device, sharing_warning
from hetero.errors import ExchangeError
from hetero.plan import VENDOR_VARIABLE
from hetero.startup.identity import identify
from hetero.text import size_text
from hetero.tools.collective_bench.all_ranks import AllRanks
from hetero.tools.collective_bench.boundary_links import BoundaryLinks
from hetero.tools.collective_bench.collective_files import write_results
from hetero.tools.collective_bench.collective_record import (
    AGAIN,
    BoundaryPoint,
    Options,
    Point,
    Record,
    bus_factor,
    crossing_share,
)
from hetero.tools.collective_bench.measured_operations import Case, Setup, new_case, places_of
from hetero.tools.link_bench.bench_record import queue_depth
from hetero.tools.link_bench.bench_table import short_size
from hetero.tools.link_bench.machine_facts import load_notes, run_facts, simulation_notes
from hetero.tools.link_bench.measured_paths import synchronize
from hetero.tools.link_bench.sizes_bar import sizes_bar

# Input, its copy, output, reference, and what making the reference takes for a moment.
_COPIES_HELD = 12
_GROUP_NAMES = {"flagcx": "cpu:gloo,cuda:flagcx"}


def run_started_rank(
    rank: int, options: Options, vendors: str, port: int, out: str, command: Sequence[str]
) -> None:
    """A rank that the tool has started itself, on this host."""
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if vendors:
        os.environ[VENDOR_VARIABLE] = vendors
    size = sum(options.parts)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=options.timeout))
    run_rank(store, rank=rank, size=size, options=options, out=out, command=command)


def run_rank(
    store: dist.Store,
    *,
    rank: int,
    size: int,
    options: Options,
    out: str,
    command: Sequence[str],
) -> tuple[str, ...]:
    """Measure; rank 0 writes the results. Returns what failed."""
    record = CollectiveSession(store, rank=rank, size=size, options=options).run(command)
    if rank == 0:
        write_results(record, Path(out))
    return record.failed


@dataclass
class _State:
    """What is open, and what has been learnt so far. The same on all ranks."""

    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    boundary: BoundaryLinks | None = None
    points: list[Point] = field(default_factory=list)
    boundary_points: list[BoundaryPoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    given_up: set[tuple[str, str]] = field(default_factory=set)
    """Of which backend which operation is not measured any more."""


class CollectiveSession:
    """One rank, from its groups to its end."""

    def __init__(self, store: dist.Store, *, rank: int, size: int, options: Options) -> None:
        # The tool names its backends itself, whatever launcher has started it.
        os.environ.pop(INSTEAD_OF_VARIABLE, None)
        hetero.register()
        self._rank, self._size, self._options, self._store = rank, size, options, store
        self._local_rank = int(os.environ.get("LOCAL_RANK", rank))
        self._local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        self._device, self._sharing = torch.device("cpu"), ""
        if options.device == "cuda":
            self._device = choose_device(self._local_rank, self._local_size)
            self._sharing = sharing_warning(self._local_size)
        else:
            torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=5 * options.timeout),
        )
        assert dist.group.WORLD is not None
        self._ranks = AllRanks(dist.group.WORLD, device=self._device)
        self._state = _State()
        self._vendors: tuple[str, ...] = ()

    def run(self, command: Sequence[str]) -> Record:
        state = self._state
        facts = run_facts(on_gpu=self._device.type == "cuda", command=command)
        state.notes += simulation_notes() + load_notes(facts["load_before"], facts["cores"])
        state.notes += [self._sharing] if self._sharing else []
        self._vendors = tuple(self._ranks.together(self._vendor))
        for name in self._options.backends:
            self._open(name)
        self._open_boundary()
        with sizes_bar(len(self._options.sizes), shown=self._ranks.leads) as begin:
            for nbytes in self._options.sizes:
                begin(size_text(nbytes))
                self._measure_size(nbytes)
        record = Record(
            facts=facts,
            options=self._options,
            vendors=self._vendors,
            hosts=tuple(self._ranks.together(socket.gethostname)),
            points=tuple(state.points),
            boundary=tuple(state.boundary_points),
            boundary_transport=state.boundary.transport if state.boundary else None,
            notes=tuple(dict.fromkeys(state.notes)),
            failed=tuple(dict.fromkeys(state.failed)),
        )
        self._close()
        return record

    def _close(self) -> None:
        if self._state.boundary is not None:
            self._state.boundary.close()
        if not self._state.failed:
            # One that failed may wait for ever.
            dist.destroy_process_group()

    def _vendor(self) -> str:
        identity = identify(
            rank=self._rank, local_rank=self._local_rank, planned_vendor="cpu", flags={}
        )
        return identity.vendor

    def _open(self, name: str) -> None:
        try:
            self._ranks.together(lambda: self._require(name))
            groups: list[dist.ProcessGroup] = []
            timeout = timedelta(seconds=self._options.timeout)
            backend = name.removesuffix(AGAIN)
            backend = _GROUP_NAMES.get(backend, backend)
            self._ranks.together(
                lambda: groups.append(dist.new_group(backend=backend, timeout=timeout))
            )
            self._state.groups[name] = groups[0]
        except ExchangeError as failure:
            self._state.notes.append(f"{name}: not measured, because {failure}")

    def _require(self, name: str) -> None:
        if name.removesuffix(AGAIN) == "nccl" and self._device.type != "cuda":
            raise RuntimeError("it needs GPUs")
        if name == "flagcx":
            try:
                importlib.import_module("flagcx")
            except ImportError as error:
                raise RuntimeError(f"its plugin for torch is absent ({error})") from error

    def _open_boundary(self) -> None:
        if len(set(self._vendors)) != 2:
            return
        store = dist.PrefixStore("boundary", self._store)
        opened: list[BoundaryLinks] = []
        try:
            self._ranks.together(
                lambda: opened.append(
                    BoundaryLinks(
                        rank=self._rank,
                        vendors=self._vendors,
                        store=store,
                        device=self._device,
                        timeout=self._options.timeout,
                    )
                )
            )
            self._state.boundary = opened[0]
        except ExchangeError as failure:
            self._state.notes.append(f"the bare links: not measured, because {failure}")

    def _measure_size(self, nbytes: int) -> None:
        dtype: torch.dtype = getattr(torch, self._options.dtype)
        whole = self._size * dtype.itemsize
        count = max(nbytes // whole, 1) * self._size
        if not self._fits(count * dtype.itemsize):
            return
        setup = Setup(
            rank=self._rank,
            ranks=self._size,
            count=count,
            dtype=dtype,
            device=self._device,
            reduction=self._options.reduction,
        )
        boundary = self._measure_boundary(count * dtype.itemsize)
        for operation in self._options.operations:
            for in_place in places_of(operation):
                case = new_case(operation, in_place=in_place, setup=setup)
                for name, group in self._state.groups.items():
                    self._measure_case(name, group, case, count * dtype.itemsize, boundary)

    def _fits(self, nbytes: int) -> bool:
        needed = _COPIES_HELD * nbytes

        def free_memory() -> int:
            if self._device.type == "cuda":
                sharing = -(-self._local_size // torch.cuda.device_count())
                return int(torch.cuda.mem_get_info(self._device)[0]) // sharing
            return int(psutil.virtual_memory().available) // self._local_size

        free = min(self._ranks.together(free_memory))
        if free >= needed:
            return True
        self._state.notes.append(
            f"{short_size(nbytes)}: not measured, because {size_text(needed)} of memory a rank are "
            f"needed and {size_text(free)} are free"
        )
        return False

    def _measure_boundary(self, nbytes: int) -> BoundaryPoint | None:
        links = self._state.boundary
        if links is None:
            return None
        try:
            links.prepare(nbytes)
            self._ranks.together(links.both_ways)
            queued = queue_depth(nbytes)
            both = self._ranks.measure(links.both_ways, self._options, queued=queued)
            one = self._ranks.measure(links.one_way, self._options, queued=queued)
            self._ranks.together(links.check)
        except ExchangeError as failure:
            self._state.notes.append(f"the bare links: FAILED at {short_size(nbytes)}: {failure}")
            self._state.failed.append("the bare links")
            self._state.boundary = None
            return None
        point = BoundaryPoint(
            nbytes=nbytes,
            one_way_us=one.queued.median * 1e6,
            both_ways_us=both.queued.median * 1e6,
        )
        self._state.boundary_points.append(point)
        return point

    def _measure_case(
        self,
        name: str,
        group: dist.ProcessGroup,
        case: Case,
        nbytes: int,
        boundary: BoundaryPoint | None,
    ) -> None:
        state, key = self._state, (name, case.name)
        if key in state.given_up:
            return
        is_gloo = name.removesuffix(AGAIN) == "gloo"
        if is_gloo and case.operation == "send_recv" and self._device.type == "cuda":
            # It takes a GPU's address for one of the host: this call fails, and all that follow.
            state.given_up.add(key)
            state.notes.append(f"{name}: {case.name}: not measured, gloo sends no GPU tensors")
            return
        size = short_size(nbytes)
        try:
            wrong = self._check(case, group)
            times = self._ranks.measure(lambda: case.call(group), self._options)
            wrong += self._check(case, group)
        except ExchangeError as failure:
            state.given_up.add(key)
            worked = any(p.backend == name and p.operation == case.operation for p in state.points)
            if worked:
                state.failed.append(f"{name}: {case.name}")
            what = "FAILED at" if worked else "not measured from"
            state.notes.append(f"{name}: {case.name}: {what} {size}: {failure}")
            return
        if wrong:
            state.failed.append(f"{name}: {case.name}")
            state.notes.append(f"{name}: {case.name}: {wrong} elements are WRONG at {size}")
        algbw = times.queued.gb_s(nbytes)[0]
        state.points.append(
            Point(
                backend=name,
                operation=case.operation,
                in_place=case.in_place,
                nbytes=nbytes,
                wrong=wrong,
                time_us=times.queued.median * 1e6,
                time_p99_us=times.queued.p99 * 1e6,
                latency_us=times.alone.median * 1e6,
                latency_p99_us=times.alone.p99 * 1e6,
                algbw_gb_s=algbw,
                busbw_gb_s=algbw * bus_factor(case.operation, self._size),
                queue_depth=times.depth,
                samples=times.alone.samples,
                boundary_us=self._boundary_us(case.operation, boundary),
            )
        )

    def _check(self, case: Case, group: dist.ProcessGroup) -> int:
        """One call, and how many elements are wrong on all ranks together."""

        def call() -> int:
            case.refill()
            synchronize(self._device)
            case.call(group)
            synchronize(self._device)
            return case.wrong()

        return sum(self._ranks.together(call))

    def _boundary_us(self, operation: str, boundary: BoundaryPoint | None) -> float | None:
        if boundary is None:
            return None
        bare = boundary.one_way_us if operation == "broadcast" else boundary.both_ways_us
        return bare * crossing_share(operation, self._vendors)
