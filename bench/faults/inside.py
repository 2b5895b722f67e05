"""Faults inside a process of training: what of it is replaced, so that it fails when it is told to.

Each waits until the program that runs the table has written the file `go`, with an iteration.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LONG = 600.0
"""Seconds that a fault lasts: longer than anybody waits."""
FAULTY = 1
"""The rank that has the fault."""
_PAGES = 4096
_BASE_SECONDS = 0.1
"""Added to each forward pass of a run in which one rank is slow: passes of a tiny model take too
little beside what else the host does."""


class Fault:
    """When one process's fault is due, and when it began."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._go, self._begun = folder / "go", folder / "begun"
        self._has_begun = False

    @property
    def is_here(self) -> bool:
        return self.rank == FAULTY

    def is_due(self) -> bool:
        """Whether the iteration has come from which on this rank has the fault."""
        from hetero.observe.record import recorder

        return self._go.exists() and recorder().iteration >= int(self._go.read_text())

    def begins(self) -> bool:
        """`is_due`, once; the time is kept."""
        if self._has_begun or not self.is_due():
            return False
        self._has_begun = True
        if self.is_here:
            self.tell_begin()
        return True

    def tell_begin(self) -> None:
        written = self._begun.with_suffix(".new")
        written.write_text(str(time.monotonic()))
        written.rename(self._begun)


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace a function by one that gets it as its first argument."""

    def replace(function: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def instead(*args: Any, **more: Any) -> Any:
            return function(original, *args, **more)

        setattr(owner, name, instead)

    return replace


def put(name: str, folder: Path, *, rank: int) -> None:
    """Put a fault into this process, before training begins; without a name none."""
    fault = Fault(folder, rank)
    if name in ON_ALL or (name in ON_ONE and fault.is_here):
        (ON_ALL.get(name) or ON_ONE[name])(fault)


def _loader(fault: Fault) -> None:
    from megatron.hetero.data import MicroBatches

    @around(MicroBatches, "__next__")
    def late(following: Callable[..., Any], batches: Any) -> Any:
        if fault.begins():
            time.sleep(LONG)
        return following(batches)


def _long_save(fault: Fault) -> None:
    from megatron.hetero.checkpoint.checkpointer import Checkpointer

    @around(Checkpointer, "save")
    def long_save(save: Callable[..., Any], saver: Any, state: Any) -> None:
        if fault.begins():
            time.sleep(LONG)
        save(saver, state)


def _in_forward(fault: Fault, act: Callable[[], None]) -> None:
    """Act once in a forward pass of the last stage."""
    from megatron.hetero import schedule

    @around(schedule, "loss_func")
    def wrapped(run: Callable[..., Any], *args: Any, **more: Any) -> Any:
        if fault.begins():
            act()
        return run(*args, **more)


def _spins(fault: Fault) -> None:
    def spin() -> None:
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            pass

    _in_forward(fault, spin)


def _swaps(fault: Fault) -> None:
    """Pages of a file are read from disk one by one, as a process does that swaps."""

    def swap() -> None:
        size = _PAGES * mmap.PAGESIZE
        with (fault.folder / "pages").open("wb+") as file:
            file.write(os.urandom(size))
            file.flush()
            os.fsync(file.fileno())
            pages = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
            end = time.monotonic() + LONG
            while time.monotonic() < end:
                pages.madvise(mmap.MADV_DONTNEED)
                os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
                pages.madvise(mmap.MADV_RANDOM)
                for page in range(_PAGES):
                    pages[page * mmap.PAGESIZE]

    _in_forward(fault, swap)


def _holds_lock(fault: Fault) -> None:
    """A call of C that keeps Python's lock."""
    _in_forward(fault, lambda: ctypes.PyDLL(None).sleep(int(LONG)))


def _allocates(fault: Fault) -> None:
    def allocate() -> None:
        import torch

        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
        kept = []
        while True:
            kept.append(torch.ones(4 << 20))

    _in_forward(fault, allocate)


def _grows(fault: Fault) -> None:
    """Takes memory until the kernel ends it: the limit is that of its group, from outside."""

    def grow() -> None:
        kept = []
        while True:
            kept.append(bytearray(os.urandom(1 << 20)) * 16)

    _in_forward(fault, grow)


def _slow(fault: Fault) -> None:
    """Passes of all replicas take a while; those of one 1.3 times as long from some time on."""
    from megatron.hetero import schedule

    factor = 1.3

    @around(schedule, "loss_func")
    def longer(run: Callable[..., Any], *args: Any, **more: Any) -> Any:
        is_slow = fault.is_here and fault.is_due()
        if is_slow:
            fault.begins()
        time.sleep(_BASE_SECONDS * (factor if is_slow else 1.0))
        return run(*args, **more)


def _misses_library_call(fault: Fault) -> None:
    from megatron.hetero import optimizer

    @around(optimizer.RankStatistics, "gather")
    def missed(gather: Callable[..., Any], *args: Any, **more: Any) -> Any:
        if fault.begins():
            time.sleep(LONG)
        return gather(*args, **more)


def _clock_set_back(fault: Fault) -> None:
    """Of one process, which is not the host's clock: that all of this machine share."""
    back, real, real_ns = 3600, time.time, time.time_ns

    def hours_back() -> int:
        if not fault.is_due():
            return 0
        fault.begins()
        return back

    time.time = lambda: real() - hours_back()
    time.time_ns = lambda: real_ns() - hours_back() * 10**9


def _group() -> Any:
    from hetero.collectives.process_group import HeteroProcessGroup

    return HeteroProcessGroup


def _around_reductions(change: Callable[[Callable[[], Any], Any, list[Any]], Any]) -> None:
    """Replace the reductions of groups across vendors: `change(reduce, group, tensors)`."""
    from hetero.collectives.process_group import HeteroProcessGroup

    @around(HeteroProcessGroup, "_all_reduce")
    def changed(
        reduce: Callable[..., Any], group: Any, operation: str, tensors: list[Any], opts: Any
    ) -> Any:
        return change(lambda: reduce(group, operation, tensors, opts), group, tensors)


def _another_size(fault: Fault) -> None:
    def shorter(reduce: Callable[[], Any], _: Any, tensors: list[Any]) -> Any:
        if fault.begins():
            tensors[0] = tensors[0].view(-1)[:-1]
        return reduce()

    _around_reductions(shorter)


def _another_operation(fault: Fault) -> None:
    def other(reduce: Callable[[], Any], group: Any, tensors: list[Any]) -> Any:
        if fault.begins():
            import torch.distributed as dist

            return group.broadcast(tensors[:1], dist.BroadcastOptions())
        return reduce()

    _around_reductions(other)


def _another_order(fault: Fault) -> None:
    """One rank makes a barrier before a reduction, the others after it."""

    def swapped(reduce: Callable[[], Any], group: Any, _: list[Any]) -> Any:
        if not fault.begins():
            return reduce()
        if fault.is_here:
            group.barrier().wait()
            return reduce()
        work = reduce()
        work.wait()
        group.barrier().wait()
        return work

    _around_reductions(swapped)


def _misses_call(fault: Fault) -> None:
    def missed(reduce: Callable[[], Any], *_: Any) -> Any:
        if fault.begins():
            time.sleep(LONG)
        return reduce()

    _around_reductions(missed)


def _two_sends(fault: Fault) -> None:
    """Two ranks each send the other a tensor that no buffer holds, and would receive then."""

    def sends(reduce: Callable[[], Any], group: Any, _: list[Any]) -> Any:
        if fault.begins():
            import torch

            group.send([torch.ones(64 << 20)], 1 - fault.rank, 0).wait()
        return reduce()

    _around_reductions(sends)


ON_ONE: dict[str, Callable[[Fault], None]] = {
    "loader": _loader,
    "long save": _long_save,
    "spins": _spins,
    "swaps": _swaps,
    "holds Python's lock": _holds_lock,
    "allocates": _allocates,
    "grows": _grows,
    "misses library call": _misses_library_call,
    "clock set back": _clock_set_back,
    "size": _another_size,
    "operation": _another_operation,
    "misses call": _misses_call,
}
"""Put into the faulty rank alone."""
ON_ALL: dict[str, Callable[[Fault], None]] = {
    "slow": _slow,
    "order": _another_order,
    "two sends": _two_sends,
}
