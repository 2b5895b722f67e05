"""The program of every rank of a benchmark: opens all that is measured, goes through the sizes.

All paths or backends are measured at one size before the next. A fault of one of them is a note of
the record, and the others are measured all the same. Every rank makes the same record.
"""

from __future__ import annotations

import importlib
import os
import platform
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import psutil
import torch
import torch.distributed as dist

import hetero
from hetero.collectives.backend import INSTEAD_OF_VARIABLE
from hetero.device.choose_device import choose_device, sharing_warning
from hetero.device.topology import rdma_devices
from hetero.errors import ExchangeError
from hetero.plan import VENDOR_VARIABLE
from hetero.startup.identity import identify, running_vendor
from hetero.text import counted, size_text
from hetero.tools.benchmark import limits
from hetero.tools.benchmark.collective import Case, CollectiveMeter, Setup, crossing_share
from hetero.tools.benchmark.limits import BoundaryLinks, PerftestRun
from hetero.tools.benchmark.link import LinkMeter, LinkOpener, LinkPath, Messages, Path
from hetero.tools.benchmark.ranks import Ranks
from hetero.tools.benchmark.record import (
    CollectiveOptions,
    LinkOptions,
    Options,
    Point,
    Record,
    queue_depth,
    short_size,
)
from hetero.version import __version__
from megatron.hetero.console import progress_bar

AGAIN = "-again"
"""A second group of a backend: how far the two differ is what a measurement cannot tell apart."""
BACKENDS = ("gloo", "nccl", "hetero", "flagcx", f"gloo{AGAIN}", f"nccl{AGAIN}")
_GROUP_NAMES = {"flagcx": "cpu:gloo,cuda:flagcx"}
_COPIES_HELD = 12
"""Of a size, by a rank: what it sends, expects and receives, its reference, and staging."""
_DRIVER_FILES = {
    "nvidia": FilePath("/proc/driver/nvidia/version"),
    "amd": FilePath("/sys/module/amdgpu/version"),
}


def run_rank(
    rank: int, size: int, store: dist.Store, *, options: Options, command: Sequence[str]
) -> Record:
    """Measure what the options are of. Every rank calls it, and makes the default group in it."""
    program = Program(rank, size, store, options=options, command=command)
    if isinstance(options, LinkOptions):
        measure_links(program, options)
    elif isinstance(options, CollectiveOptions):
        measure_collectives(program, options)
    if not program.record.failed:
        # What failed may wait for ever.
        dist.destroy_process_group()
    return program.record


class Program:
    """One rank: where it runs, what it has found, and the other ranks."""

    def __init__(
        self, rank: int, size: int, store: dist.Store, *, options: Options, command: Sequence[str]
    ) -> None:
        self.store, self._sizes = store, options.sizes
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        self._local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        self.on_gpu, self.device = options.device == "cuda", torch.device("cpu")
        if self.on_gpu:
            self.device = choose_device(local_rank, self._local_size)
        keeps_threads = options.keep_threads if isinstance(options, LinkOptions) else self.on_gpu
        if not keeps_threads:
            torch.set_num_threads(1)
        patience = 5 * options.timeout
        # A link of gloo or nccl runs over the default group.
        of_links = isinstance(options, LinkOptions) and self.on_gpu
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if of_links else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=patience),
        )
        self.ranks = Ranks(rank, size, dist.PrefixStore("words", store), timeout=patience)
        self.record = Record(options, run_facts(on_gpu=self.on_gpu, command=command))
        own = self.ranks.together(lambda: (_vendor(rank, local_rank), socket.gethostname()))
        self.vendors = [vendor for vendor, _ in own]
        self.record.facts |= {"vendors": self.vendors, "hosts": [host for _, host in own]}
        self.record.notes += simulation_notes()
        self.record.notes += load_notes(
            self.record.facts["load_before"], self.record.facts["cores"]
        )
        if self.on_gpu and (sharing := sharing_warning(self._local_size)):
            self.record.notes.append(sharing)

    def open(self, name: str, step: Callable[[], Any]) -> bool:
        """Whether what has this name could be opened; where not, a note says why."""
        try:
            step()
        except ExchangeError as failure:
            self.record.notes.append(f"{name}: not measured, because {failure}")
            return False
        return True

    def fail(self, name: str, how: str) -> None:
        """What had worked does not any more, or is wrong."""
        self.record.failed.append(name)
        self.record.notes.append(f"{name}: {how}")

    def beside(self, point: Point, limit: str | None, *, share: float = 1.0) -> Point:
        """The point with its bare path, where that was measured at this size, which is before."""
        bare = (p for p in self.record.points if (p.name, p.nbytes) == (limit, point.nbytes))
        found = next(bare, None)
        return point if found is None else point.beside(found, share=share)

    def sizes(self) -> Iterator[int]:
        """Each size for which there is memory, with a bar on rank 0's terminal."""
        leads = self.ranks.leads
        with progress_bar(total=len(self._sizes), shown=leads, unit="size", leave=False) as bar:
            for nbytes in self._sizes:
                bar.set_description(short_size(nbytes))
                if self._fits(nbytes):
                    yield nbytes
                bar.update()

    def _fits(self, nbytes: int) -> bool:
        def free_memory() -> int:
            if self.on_gpu:
                sharing = -(-self._local_size // torch.cuda.device_count())
                return int(torch.cuda.mem_get_info(self.device)[0]) // sharing
            return int(psutil.virtual_memory().available) // self._local_size

        needed, free = _COPIES_HELD * nbytes, min(self.ranks.together(free_memory))
        if free < needed:
            self.record.notes.append(
                f"{short_size(nbytes)}: not measured, because {size_text(needed)} of memory a rank "
                f"are needed and {size_text(free)} are free"
            )
        return free >= needed


def _vendor(rank: int, local_rank: int) -> str:
    return identify(rank=rank, local_rank=local_rank, planned_vendor="cpu", flags={}).vendor


# Links.


def measure_links(program: Program, options: LinkOptions) -> None:
    """Every transport between two ranks of one host, beside the bare paths."""
    ranks, record = program.ranks, program.record
    idle = {"seconds": options.idle_seconds}
    without_links = _idle_cores(program, options)
    paths = _open_paths(program, options)
    meter, perftest = LinkMeter(ranks, options), _perftest(program)
    for nbytes in program.sizes():
        source = torch.ones(nbytes, dtype=torch.uint8, device=program.device)
        record.points += [
            limits.measure_copy(copy, ranks=ranks, options=options)
            for copy in limits.bare_copies(source)
        ]
        del source
        perftest = _measure_rdma(program, perftest, nbytes)
        messages: dict[torch.device, Messages] = {}
        for path in list(paths):
            if path.device not in messages:
                messages[path.device] = Messages.of(nbytes, rank=ranks.rank, device=path.device)
            try:
                point = meter.measure(path, messages[path.device])
            except ExchangeError as failure:
                program.fail(path.name, f"FAILED at {short_size(nbytes)}: {failure}")
                paths.remove(path)
                path.close()
                continue
            if isinstance(path, LinkPath):
                limit = limits.limit_of(
                    path.link.transport, on_gpu=program.on_gpu, connections=options.connections
                )
                point = program.beside(point, limit)
            record.points.append(point)
    with_links = _idle_cores(program, options)
    record.idle_cores = idle | {"without_links": without_links, "with_links": with_links}
    for path in paths:
        path.close()


def _open_paths(program: Program, options: LinkOptions) -> list[Path]:
    """Sockets, which bound transports, before these."""
    ranks, store = program.ranks, program.store
    paths: list[Path] = [
        limits.open_sockets(
            limits.sockets_name(connections),
            rank=ranks.rank,
            connections=connections,
            store=dist.PrefixStore(f"sockets/{connections}", store),
            timeout=options.timeout,
        )
        for connections in sorted({1, options.connections})
    ]
    opener = LinkOpener(ranks, options=options, store=store, device=program.device)

    def open_link(name: str) -> None:
        path, facts = opener.open(name)
        paths.append(path)
        program.record.links.append(facts)

    for name in options.transports:
        program.open(name, partial(open_link, name))
    return paths


def _idle_cores(program: Program, options: LinkOptions) -> list[float]:
    """Cores that each rank keeps busy while all have nothing to do."""

    def idle() -> float:
        begin = time.process_time()
        time.sleep(options.idle_seconds)
        return (time.process_time() - begin) / options.idle_seconds

    return program.ranks.together(idle)


def _perftest(program: Program) -> PerftestRun | None:
    """What to run on this host's RDMA devices; None, and a note, where nothing can be."""
    devices = rdma_devices()
    reason = limits.perftest_missing([device.name for device in devices])
    if reason is not None:
        program.record.notes.append(reason)
        return None
    ends = devices[0], devices[:2][-1]
    if any(device.pci is None for device in ends):
        program.record.notes.append(
            f"emulated: {limits.RDMA_WRITE} ran on an RDMA device that sits on no PCIe bus"
        )
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    return PerftestRun(devices=(ends[0].name, ends[1].name), port=port)


def _measure_rdma(program: Program, run: PerftestRun | None, nbytes: int) -> PerftestRun | None:
    """Rank 0 starts both of perftest's processes. Gives None once it has failed."""
    if run is None:
        return None
    measure, ranks = partial(limits.measure_write, run, nbytes), program.ranks
    try:
        point = ranks.together(lambda: measure() if ranks.leads else None)[0]
    except ExchangeError as failure:
        program.record.notes.append(f"from {short_size(nbytes)} on: {failure}")
        return None
    program.record.points += [point] if point else []
    return run


# Collectives.


def measure_collectives(program: Program, options: CollectiveOptions) -> None:
    """Every operation of every backend, beside the bare links between two vendors."""
    # The tool names its backends itself, whatever launcher has started it.
    os.environ.pop(INSTEAD_OF_VARIABLE, None)
    hetero.register()
    world = dist.group.WORLD
    assert world is not None
    meter = CollectiveMeter(program.ranks, options, group=world, device=program.device)
    groups = _open_groups(program, options)
    dtype: torch.dtype = getattr(torch, options.dtype)
    given_up: set[tuple[str, str]] = set()
    with ExitStack() as closing:
        boundary = _open_boundary(program, options, closing)
        for asked in program.sizes():
            size = program.ranks.size
            count = max(asked // (size * dtype.itemsize), 1) * size
            nbytes = count * dtype.itemsize
            if boundary is not None and not _measure_boundary(program, boundary, meter, nbytes):
                boundary = None
            setup = Setup(
                rank=program.ranks.rank,
                ranks=size,
                count=count,
                dtype=dtype,
                device=program.device,
                reduction=options.reduction,
            )
            for operation in options.operations:
                for case in setup.cases(operation):
                    for name, group in groups.items():
                        if (name, case.name) not in given_up and not _measure_case(
                            program, meter, case, group, name=name, nbytes=nbytes
                        ):
                            given_up.add((name, case.name))


def _open_groups(program: Program, options: CollectiveOptions) -> dict[str, dist.ProcessGroup]:
    groups: dict[str, dist.ProcessGroup] = {}
    timeout = timedelta(seconds=options.timeout)

    def require(name: str) -> None:
        if name == "nccl" and not program.on_gpu:
            raise RuntimeError("it needs GPUs")
        if name == "flagcx":
            try:
                importlib.import_module("flagcx")
            except ImportError as error:
                raise RuntimeError(f"its plugin for torch is absent ({error})") from error

    def make(name: str, backend: str) -> None:
        groups[name] = dist.new_group(backend=backend, timeout=timeout)

    def open_group(name: str) -> None:
        backend = name.removesuffix(AGAIN)
        program.ranks.together(lambda: require(backend))
        program.ranks.together(lambda: make(name, _GROUP_NAMES.get(backend, backend)))

    for name in options.backends:
        if not program.open(name, partial(open_group, name)):
            groups.pop(name, None)
    return groups


def _open_boundary(
    program: Program, options: CollectiveOptions, closing: ExitStack
) -> BoundaryLinks | None:
    if len(set(program.vendors)) != 2:
        return None
    opened: list[BoundaryLinks] = []

    def open_links() -> None:
        links = BoundaryLinks(
            rank=program.ranks.rank,
            vendors=program.vendors,
            store=dist.PrefixStore("boundary", program.store),
            device=program.device,
            timeout=options.timeout,
        )
        opened.append(closing.enter_context(links))

    if not program.open("the bare links", lambda: program.ranks.together(open_links)):
        return None
    program.record.facts |= {"boundary_transport": opened[0].transport}
    return opened[0]


def _measure_boundary(
    program: Program, links: BoundaryLinks, meter: CollectiveMeter, nbytes: int
) -> bool:
    """Both ways at once, and one way. Whether the links still work."""
    ranks = program.ranks
    queued = queue_depth(nbytes)
    try:
        links.prepare(nbytes)
        ranks.together(links.both_ways)
        for name, call in ((links.BOTH_WAYS, links.both_ways), (links.ONE_WAY, links.one_way)):
            point = Point(name=name, nbytes=nbytes, is_limit=True)
            program.record.points.append(meter.time(call, point, queued=queued))
        ranks.together(links.check)
    except ExchangeError as failure:
        program.fail("the bare links", f"FAILED at {short_size(nbytes)}: {failure}")
        return False
    return True


def _measure_case(
    program: Program,
    meter: CollectiveMeter,
    case: Case,
    group: dist.ProcessGroup,
    *,
    name: str,
    nbytes: int,
) -> bool:
    """Whether this case is to be measured at further sizes too."""
    record, what = program.record, f"{name}: {case.name}"
    if name.removesuffix(AGAIN) == "gloo" and case.operation == "send_recv" and program.on_gpu:
        # It takes a GPU's address for one of the host: this call fails, and all that follow.
        record.notes.append(f"{what}: not measured, gloo sends no GPU tensors")
        return False
    try:
        point = meter.measure(case, group, name=name, nbytes=nbytes)
    except ExchangeError as failure:
        if any(p.name == name and p.operation == case.operation for p in record.points):
            program.fail(what, f"FAILED at {short_size(nbytes)}: {failure}")
        else:
            record.notes.append(f"{what}: not measured from {short_size(nbytes)}: {failure}")
        return False
    if point.wrong:
        program.fail(what, f"{point.wrong} elements are WRONG at {short_size(nbytes)}")
    limit = BoundaryLinks.ONE_WAY if case.operation == "broadcast" else BoundaryLinks.BOTH_WAYS
    share = crossing_share(case.operation, program.vendors)
    record.points.append(program.beside(point, limit, share=share))
    return True


# What places the numbers of a run: the hardware, the software, the moment.


def run_facts(*, on_gpu: bool, command: Sequence[str]) -> dict[str, Any]:
    """As they are now; to be taken before the measuring, for the load of the machine is one."""
    vendor = running_vendor() if on_gpu else "cpu"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "device": torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU",
        "on_gpu": on_gpu,
        "vendor": vendor,
        "simulated": bool(os.environ.get(VENDOR_VARIABLE)),
        "driver": _driver_version(vendor),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "project": __version__,
    }


def load_notes(load: float, cores: int) -> list[str]:
    """A line where the machine had other work before the measuring began."""
    if load < 0.5 * cores:
        return []
    return [
        f"other work was running: the load was {load:.1f} on {counted(cores, 'core')} before the "
        "measuring began; compare ratios only"
    ]


def simulation_notes(environ: Mapping[str, str] = os.environ) -> list[str]:
    """A line where this machine was told to play a vendor."""
    override = environ.get(VENDOR_VARIABLE)
    if not override:
        return []
    return [
        f"simulated: {VENDOR_VARIABLE}={override} was set, and every process ran on "
        f"{running_vendor()}; the numbers are {running_vendor()}'s"
    ]


def _driver_version(vendor: str) -> str | None:
    """The first line that the GPU's kernel driver says of itself; None for a CPU."""
    try:
        return _DRIVER_FILES[vendor].read_text().strip().split("\n", 1)[0] or None
    except (KeyError, OSError):
        return None


def _cpu_model() -> str | None:
    """The processor's name as the kernel has it."""
    try:
        lines = FilePath("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None)
