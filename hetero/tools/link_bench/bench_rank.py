"""A whole run: opens every transport, measures all paths at one size before the next, reports."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path as FilePath

import psutil
import torch
import torch.distributed as dist

from hetero.device.topology import rdma_devices
from hetero.errors import ExchangeError
from hetero.text import size_text
from hetero.tools.link_bench import perftest
from hetero.tools.link_bench.bare_limits import bare_copies, measure_copy
from hetero.tools.link_bench.bench_files import share_of_limits, write_report
from hetero.tools.link_bench.bench_record import (
    IdleUse,
    LinkFacts,
    Options,
    Point,
    Record,
    sockets_name,
)
from hetero.tools.link_bench.machine_facts import load_notes, run_facts, simulation_notes
from hetero.tools.link_bench.measured_paths import Path, open_sockets
from hetero.tools.link_bench.measured_points import Messages, Meter
from hetero.tools.link_bench.opened_links import Opener
from hetero.tools.link_bench.sizes_bar import sizes_bar
from hetero.tools.link_bench.two_ranks import Pair

# Each process holds what it sends, what it expects and what it receives; the rest is staging.
_COPIES_HELD = 8
_GROUP_SECONDS = 600.0


@dataclass
class _State:
    """What is open, and what has been learnt so far. The same in both processes."""

    paths: list[Path] = field(default_factory=list)
    facts: list[LinkFacts] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def run_rank(rank: int, options: Options, folder: str, out: str, command: Sequence[str]) -> None:
    """One of the two processes, from its start to its end. Rank 0 writes the report."""
    session = Session(rank, options, folder)
    record = session.run(command)
    if session.pair.leads:
        write_report(record, FilePath(out))
    dist.destroy_process_group()


class Session:
    """One of the two processes."""

    def __init__(self, rank: int, options: Options, folder: str) -> None:
        if not options.keep_threads:
            torch.set_num_threads(1)
        self.options = options
        self.on_gpu = torch.cuda.device_count() >= 2 and not options.on_cpu
        self.device = torch.device("cuda", rank) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        self._store = dist.FileStore(f"{folder}/store", 2)
        limit = timedelta(seconds=_GROUP_SECONDS)
        # The default group is what the gloo link runs over.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.on_gpu else "gloo",
            store=dist.PrefixStore("group", self._store),
            rank=rank,
            world_size=2,
            timeout=limit,
        )
        words = dist.PrefixStore("words", self._store)
        self.pair = Pair(rank, words, timeout=_GROUP_SECONDS)
        self._meter = Meter(self.pair, options)
        self._state = _State()

    def run(self, command: Sequence[str]) -> Record:
        state = self._state
        facts = run_facts(on_gpu=self.on_gpu, command=command)
        state.notes += simulation_notes() + load_notes(facts["load_before"], facts["cores"])
        if torch.cuda.device_count() == 1 and not self.options.on_cpu:
            state.notes.append("CPU tensors: there is one GPU, and each process needs its own")
        without_links = self._idle_cores()
        self._open_all()
        self._measure_sizes()
        idle = IdleUse(self.options.idle_seconds, without_links, self._idle_cores())
        for path in state.paths:
            path.close()
        return Record(
            facts=facts,
            options=self.options,
            points=share_of_limits(state.points),
            links=tuple(state.facts),
            idle=idle,
            notes=tuple(state.notes),
            failed=tuple(state.failed),
        )

    def _open_all(self) -> None:
        opener = Opener(self.pair, options=self.options, store=self._store, device=self.device)
        for name in self.options.transports:
            try:
                path, facts = opener.open(name)
            except ExchangeError as failure:
                self._state.notes.append(f"{name}: not measured, because {failure}")
                continue
            self._state.paths.append(path)
            self._state.facts.append(facts)
        for connections in sorted({1, self.options.connections}):
            sockets = open_sockets(
                sockets_name(connections),
                rank=self.pair.rank,
                connections=connections,
                store=dist.PrefixStore(f"sockets/{connections}", self._store),
                timeout=self.options.timeout,
            )
            self._state.paths.append(sockets)

    def _idle_cores(self) -> tuple[float, float]:
        """Cores that each process keeps busy while both have nothing to do."""

        def idle() -> float:
            begin = time.process_time()
            time.sleep(self.options.idle_seconds)
            return (time.process_time() - begin) / self.options.idle_seconds

        cores = self.pair.together(idle)
        return cores.rank0, cores.rank1

    def _measure_sizes(self) -> None:
        run = self._perftest()
        with sizes_bar(len(self.options.sizes), shown=self.pair.leads) as begin:
            for nbytes in self.options.sizes:
                begin(size_text(nbytes))
                if not self._fits(nbytes):
                    continue
                self._measure_paths(nbytes)
                self._measure_copies(nbytes)
                run = self._measure_rdma(run, nbytes)

    def _fits(self, nbytes: int) -> bool:
        free = self.pair.together(lambda: int(psutil.virtual_memory().available)).rank0
        needed = _COPIES_HELD * nbytes
        if free >= needed:
            return True
        self._state.notes.append(
            f"{size_text(nbytes)}: not measured, because {size_text(needed)} of memory are needed "
            f"and {size_text(free)} are free"
        )
        return False

    def _measure_paths(self, nbytes: int) -> None:
        state = self._state
        messages: dict[torch.device, Messages] = {}
        for path in list(state.paths):
            if path.device not in messages:
                messages[path.device] = Messages.of(nbytes, rank=self.pair.rank, device=path.device)
            try:
                state.points.append(self._meter.measure(path, messages[path.device]))
            except ExchangeError as failure:
                state.notes.append(f"{path.name}: FAILED at {size_text(nbytes)}: {failure}")
                state.failed.append(path.name)
                state.paths.remove(path)
                path.close()

    def _measure_copies(self, nbytes: int) -> None:
        source = torch.ones(nbytes, dtype=torch.uint8, device=self.device)
        measure = partial(measure_copy, pair=self.pair, options=self.options)
        self._state.points += [measure(copy) for copy in bare_copies(source)]

    def _perftest(self) -> perftest.PerftestRun | None:
        """What to run on this host's RDMA devices; None, and a line, where nothing can be."""
        devices = rdma_devices()
        reason = perftest.unavailable_reason([device.name for device in devices])
        if reason is not None:
            self._state.notes.append(reason)
            return None
        ends = devices[0], devices[:2][-1]
        if any(device.pci is None for device in ends):
            self._state.notes.append(
                f"emulated: {perftest.PROGRAM} ran on an RDMA device that sits on no PCIe bus"
            )
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        return perftest.PerftestRun(devices=(ends[0].name, ends[1].name), port=port)

    def _measure_rdma(
        self, run: perftest.PerftestRun | None, nbytes: int
    ) -> perftest.PerftestRun | None:
        """Rank 0 starts both of perftest's processes. Gives None once it has failed."""
        if run is None:
            return None
        step = partial(perftest.measure_write, run, nbytes)
        try:
            point = self.pair.together(lambda: step() if self.pair.leads else None).rank0
        except ExchangeError as failure:
            self._state.notes.append(f"from {size_text(nbytes)} on: {failure}")
            return None
        if point is not None:
            self._state.points.append(point)
        return run
