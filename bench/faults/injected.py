"""The faults of the table: how each is put into a run, and what has to be said of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.faults import tracer
from bench.faults.run import Run

_PIPELINE = tuple(
    "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1".split()
)
_REPLICAS = ("--hetero-data-parallel", "amd:1,nvidia:1")
_THREE = (*_PIPELINE, "--hetero-data-sizes", "1", "2")
_SAVES = ("--save", "FOLDER/save", "--save-interval", "10")
_RAILS = (
    *_PIPELINE,
    *"--hetero-transport tcp --hetero-tcp-connections 2 --hetero-chunk-kib 64".split(),
    *"--hidden-size 256 --ffn-hidden-size 256 --seq-length 256".split(),
    *"--max-position-embeddings 256 --micro-batch-size 4 --global-batch-size 16".split(),
)
"""Messages of a megabyte, over two rails."""
MEGABITS = 200
"""Of the rails of which one gets slow: these, and not the CPU, limit what they carry."""
_RANK_1 = r"rank 1 on \S+ \(stage \d, nvidia\)"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row of the table. Rank 1 has it, unless it is of a host or of both ranks."""

    name: str
    says: str
    """A regular expression of the line that names whom and why."""
    who: str = "rank 1 on"
    """A regular expression that each warning before that has to match as well."""
    inside: str = ""
    """Its name in inside.py, if it is one of a process."""
    act: Callable[[Run], AbstractContextManager[None]] | None = None
    """Puts it into a run from outside."""
    prepare: Callable[[Path], AbstractContextManager[None]] | None = None
    """What it needs before the run, in the run's folder."""
    flags: tuple[str, ...] = _PIPELINE
    ranks: int = 2
    """Of a host."""
    before: Callable[[Run], None] | None = None
    """What is changed once training goes on, some time before the fault."""
    rails: int = 0
    """Between two emulated hosts; 0: one host."""
    ends: bool = False
    """Whether the run ends by itself, with an error."""


@contextmanager
def _signalled(run: Run, *, number: signal.Signals) -> Iterator[None]:
    run.faulty.send_signal(number)
    yield


@contextmanager
def _traced(run: Run, *, named: str = "") -> Iterator[None]:
    """Hold rank 1, or those of its threads whose names begin so, as a debugger does."""
    words = tracer.command(run.faulty.pid, named=named)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as debugger:
        try:
            assert debugger.stdout is not None
            if debugger.stdout.readline() != "attached\n":
                raise RuntimeError("the process cannot be traced")
            yield
        finally:
            debugger.kill()


@contextmanager
def _without_launcher(run: Run) -> Iterator[None]:
    """The launcher of the second host is killed, and not the ranks that it started."""
    launcher = run.faulty.parent()
    assert launcher is not None
    launcher.kill()
    yield


@contextmanager
def _small_memory(run: Run) -> Iterator[None]:
    """Rank 1 gets a group of its own, in which the kernel ends what takes too much memory."""
    group = Path(f"/sys/fs/cgroup/memory/fault-table-{os.getpid()}")
    process, root = run.faulty, group.parent
    group.mkdir()
    limit = process.memory_info().rss + (64 << 20)
    (group / "memory.limit_in_bytes").write_text(str(limit))
    (group / "cgroup.procs").write_text(str(process.pid))
    run.go()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (root / "cgroup.procs").write_text(str(process.pid))
        with contextlib.suppress(OSError):
            group.rmdir()


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """The folder of checkpoints is a file system of its own, which is full after a few."""
    (folder / "save").mkdir()
    options = ("-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder / "save"))
    subprocess.run(["mount", *options], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder / "save")], check=True)


@contextmanager
def _filled_disk(run: Run) -> Iterator[None]:
    with contextlib.suppress(OSError), (run.folder / "save" / "other").open("wb") as file:
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    yield


def _down(run: Run) -> AbstractContextManager[None]:
    assert run.network is not None
    return run.network.down(run.hosts[1], rail=1)


def _partition(run: Run) -> AbstractContextManager[None]:
    assert run.network is not None
    return run.network.cut(run.hosts[1], rail=0)


def _shape(run: Run, megabits: int, *, rails: Sequence[int]) -> None:
    """Limit what both hosts send over these rails, with little burst: steps are short."""
    rate = f"tbf rate {megabits}mbit burst 64k latency 100ms"
    for host in run.hosts:
        for rail in rails:
            host.run(
                *("tc", "qdisc", "replace", "dev", host.interfaces[rail], "root"), *rate.split()
            )


@contextmanager
def _slow_rail(run: Run, *, megabits: int) -> Iterator[None]:
    _shape(run, megabits, rails=(1,))
    yield


def _lossy_rail(run: Run) -> AbstractContextManager[None]:
    assert run.network is not None
    return run.network.losses(run.hosts[0], rail=1, percent=10)


FAULTS = (
    Fault(
        name="rank killed",
        says=r"error: rank 1 on \S+ \(stage 1, nvidia\) was killed by SIGKILL",
        act=partial(_signalled, number=signal.SIGKILL),
        ends=True,
    ),
    Fault(
        name="rank stopped",
        says=rf"{_RANK_1}.*is stopped: its process \d+ got SIGSTOP",
        act=partial(_signalled, number=signal.SIGSTOP),
    ),
    Fault(
        name="in its loader",
        says=rf"{_RANK_1}, which has been in its data loader for \d+ s \(at .* in late",
        inside="loader",
    ),
    Fault(
        name="in a long save",
        says=rf"{_RANK_1}, which has been saving a checkpoint for \d+ s \(at .* in long_save",
        inside="long save",
        flags=(*_PIPELINE, *_SAVES),
    ),
    Fault(name="swapping", says=rf"{_RANK_1}, which swaps: \d+ pages a second", inside="swaps"),
    Fault(
        name="spinning on one core",
        says=rf"{_RANK_1}, which computes on one core without an end, .*\(at .* in spin",
        inside="spins",
    ),
    Fault(
        name="slow by 1.3",
        says=rf"{_RANK_1} computes slower than its peers of the same vendor and stage",
        inside="slow",
        flags=_THREE,
        ranks=3,
    ),
    Fault(
        name="rail down",
        says=rf"{_RANK_1}.*rail 1 \(10\.77\.1\.\d to 10\.77\.1\.\d\) is lost: .*; 1 of 2 rails go",
        act=_down,
        flags=_RAILS,
        ranks=1,
        rails=2,
    ),
    Fault(
        name="rail slow by ten",
        says=rf"{_RANK_1}.*: rail 10\.77\.1\.\d to 10\.77\.1\.\d is slow: it carries",
        before=partial(_shape, megabits=MEGABITS, rails=(0, 1)),
        act=partial(_slow_rail, megabits=MEGABITS // 10),
        flags=_RAILS,
        ranks=1,
        rails=2,
    ),
    Fault(
        name="rail losing packets",
        says=rf"{_RANK_1}.*: rail 10\.77\.1\.\d to 10\.77\.1\.\d loses packets: ",
        act=_lossy_rail,
        flags=_RAILS,
        ranks=1,
        rails=2,
    ),
    Fault(
        name="collective of another size",
        says=r"rank 1 on \S+ \(nvidia\) called all_reduce \S+ \(SUM, float32 \[\d+\]\) as number",
        inside="size",
        flags=_REPLICAS,
        ends=True,
    ),
    Fault(
        name="collective in another order",
        says=r"rank 1 on \S+ \(nvidia\) called barrier as number \d+",
        inside="order",
        flags=_REPLICAS,
        ends=True,
    ),
    Fault(
        name="another collective",
        says=r"rank 1 on \S+ \(nvidia\) called broadcast \(.*\) as number \d+",
        inside="operation",
        flags=_REPLICAS,
        ends=True,
    ),
    Fault(
        name="collective not called",
        says=rf"{_RANK_1}, which .*\(at .* in missed",
        inside="misses call",
        flags=_REPLICAS,
    ),
    Fault(
        name="deadlock of two sends",
        says=r"wait for each other: rank 0 on .* to rank 1 on .*; rank 1 on .* to rank 0 on ",
        inside="two sends",
        flags=_REPLICAS,
    ),
    Fault(
        name="full disk",
        says=r"[Nn]o space left on device",
        prepare=_small_disk,
        act=_filled_disk,
        flags=(*_PIPELINE, *_SAVES),
    ),
    Fault(
        name="out of memory",
        says=rf"error: {_RANK_1} ran out of memory \(",
        inside="allocates",
        ends=True,
    ),
    Fault(
        name="killed for its memory",
        says=r"error: .*rank 1 on .*was killed by SIGKILL; the host ran out of memory",
        inside="grows",
        act=_small_memory,
        ends=True,
    ),
    Fault(
        name="call of the vendor's library missed",
        says=rf"{_RANK_1}, which .*\(at .* in missed",
        inside="misses library call",
    ),
    Fault(
        name="hang inside the vendor's library",
        says=r"rank 0 on .*, rank 1 on .* inside the same call of their vendor's library for \d+ s",
        act=partial(_traced, named="gloo"),
    ),
    Fault(
        name="Python's lock held by C",
        says=rf"{_RANK_1}.*does not give Python's lock back",
        inside="holds Python's lock",
    ),
    Fault(
        name="partition of two hosts",
        says=rf"{_RANK_1}.*: its host hostb does not answer hosta, .* the network between the two",
        act=_partition,
        ranks=1,
        rails=1,
    ),
    Fault(
        name="clock set back an hour",
        says=r"clock of rank 1 on .* was set back by 3600",
        inside="clock set back",
    ),
    Fault(
        name="rank in a debugger",
        says=rf"{_RANK_1}.*is held by a debugger: ",
        act=_traced,
    ),
    Fault(
        name="a node's launcher killed",
        says=r"rank 1.* because its launcher, process \d+ on hostb, was killed",
        act=_without_launcher,
        ranks=1,
        rails=1,
        ends=True,
    ),
)
