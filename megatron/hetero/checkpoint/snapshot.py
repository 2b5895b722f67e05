"""A copy of this rank's state in host memory, so that training continues while it is written.

Device memory is copied on a side stream to pinned memory that a thread allocates while training
continues. Pinning blocks other threads' driver calls while it faults in fresh pages, so memory is
allocated in parts: each is touched first, without the driver, and then pinned, which is short.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import psutil
import torch

from hetero.device.driver import GpuDriver, driver_for
from hetero.errors import HeteroError, LinkError
from hetero.text import size_text
from megatron.hetero.checkpoint.safetensors_writer import WriteItem


class DeviceToHostCopier:
    """Copies on a high-priority side stream, ordered by events; on a CPU, synchronous copies.

    The caller must keep both tensors alive until the copy's event has completed or its own stream
    waits for it, so `record_stream` is not needed. None stands for a completed event.
    """

    def __init__(self, device: torch.device, *, driver: GpuDriver | None = None) -> None:
        self._device = device
        self._driver: GpuDriver | None = None
        if device.type != "cpu":
            self._driver = driver or driver_for(device)
            self._index = torch.cuda.current_device() if device.index is None else device.index
            self._stream = torch.cuda.Stream(device, priority=-1)

    def record_event(self) -> torch.cuda.Event | None:
        """Record an event on the caller's current stream."""
        if self._driver is None:
            return None
        return torch.cuda.current_stream(self._device).record_event()

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, *, after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Copy byte tensors of equal size once `after` has completed; returns the copy's event."""
        if self._driver is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait_on_current_stream(self, event: torch.cuda.Event | None) -> None:
        """Make the caller's current stream wait for an event."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def register(self, host: torch.Tensor) -> None:
        """Pin host memory, so that the device copies to it at full speed."""
        if self._driver is not None:
            with self._driver.on_device(self._index):
                self._driver.register_host(host.data_ptr(), host.numel())

    def unregister(self, host: torch.Tensor) -> None:
        """Undo `register`. The memory must not be in use by a copy."""
        if self._driver is not None:
            # After a GPU error every call fails, and the error has been reported already.
            with suppress(LinkError), self._driver.on_device(self._index):
                self._driver.unregister_host(host.data_ptr())


PART_BYTES = 64 << 20
STALL_SECONDS = 60.0
"""Give up if one part takes longer than this."""
SPARED_BYTES = 512 << 20
"""Host memory to leave free for everything else."""


class HostMemory:
    """Page-aligned memory, pinned if there is an accelerator; allocation starts at once.

    Not inherited by forked processes: a fork would copy all pinned pages.
    """

    def __init__(self, size: int, copies: DeviceToHostCopier) -> None:
        self.size = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
        self._copies = copies
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._parts: list[torch.Tensor] = []
        self._problem: Exception | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._make, name="checkpoint memory", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until the memory is allocated. Raises HeteroError if that fails or stalls."""
        while self._thread.is_alive():
            made = len(self._parts)
            self._thread.join(STALL_SECONDS)
            if self._thread.is_alive() and len(self._parts) == made:
                raise HeteroError(
                    f"pinning {size_text(self.size)} has stood still for {STALL_SECONDS:g} s after "
                    f"{size_text(made * PART_BYTES)}"
                )
        if self._problem is not None:
            raise HeteroError(_reason(self._problem)) from self._problem

    def spans(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        """The bytes [begin, end), split at the boundaries of separately pinned parts."""
        while begin < end:
            number, offset = divmod(begin, PART_BYTES)
            length = min(PART_BYTES - offset, end - begin)
            yield self._parts[number][offset : offset + length]
            begin += length

    def whole(self, begin: int, end: int) -> torch.Tensor:
        """The bytes [begin, end) as one tensor."""
        return self._bytes[begin:end]

    def close(self) -> None:
        """Unpin and free. No copy may be in progress."""
        self._stopped.set()
        self._thread.join(STALL_SECONDS)
        # A thread still blocked in the driver releases its parts itself when it returns.
        if not self._thread.is_alive():
            self._release()

    def _make(self) -> None:
        try:
            mapping = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            mapping.madvise(mmap.MADV_DONTFORK)
            self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)
            for part in self._bytes.split(PART_BYTES):
                if self._stopped.is_set():
                    break
                self._require_room(part.numel())
                # zero_, unlike an assignment, releases the GIL.
                part[:: mmap.PAGESIZE].zero_()
                self._copies.register(part)
                self._parts.append(part)
            if self._stopped.is_set():
                self._release()
        except Exception as error:  # told by `wait`
            self._problem = error
            self._release()

    def _release(self) -> None:
        while self._parts:
            self._copies.unregister(self._parts.pop())
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _require_room(self, size: int) -> None:
        """Raise MemoryError before the kernel, which overcommits, would kill the process."""
        free = psutil.virtual_memory().available
        if free < size + SPARED_BYTES:
            raise MemoryError(
                f"{size_text(self.size)} are needed, and {size_text(free)} are free after "
                f"{size_text(len(self._parts) * PART_BYTES)} of them"
            )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


_SPARE_BYTES = 1 << 20
"""RNG states are stored as text of varying length."""


class Snapshot:
    """One snapshot's host memory, reused from save to save and pinned if there is an accelerator.

    Copies overlap with the next forward and backward pass; call `order_updates` before anything
    modifies the copied tensors.
    """

    def __init__(self, copies: DeviceToHostCopier) -> None:
        self._copies = copies
        self._memory: HostMemory | None = None
        self._events: list[torch.cuda.Event | None] = []
        self.memory_wait_s = 0.0
        """Seconds for which the last `take` waited for its memory."""

    def reserve(self, size: int) -> None:
        """Start allocating `size` bytes in a thread. Returns at once."""
        if self._memory is not None and self._memory.size < size:
            self.close()
        if self._memory is None:
            self._memory = HostMemory(size + _SPARE_BYTES, self._copies)

    def take(self, write_items: Sequence[WriteItem]) -> list[WriteItem]:
        """Start the copies; returns items whose elements are in host memory once `wait` returns.

        Raises HeteroError if memory is short; the next call tries again.
        """
        memory = self._room(copy_bytes(write_items))
        after = self._copies.record_event()
        copies, begin = [], 0
        self._events = []
        for write_item in write_items:
            end = begin + write_item.bytes
            source, done = write_item.source().detach().reshape(-1).view(torch.uint8), 0
            for target in memory.spans(begin, end):
                part = source[done : done + target.numel()]
                self._events.append(self._copies.copy(target, part, after=after))
                done += target.numel()
            values = memory.whole(begin, end).view(write_item.dtype)
            copies.append(replace(write_item, source=partial(_identity, values)))
            begin += _aligned(write_item.bytes)
        return copies

    def wait(self) -> None:
        """Block until all copies have completed. On any thread."""
        for event in self._events:
            if event is not None:
                event.synchronize()

    def order_updates(self) -> None:
        """Make the caller's current stream wait for the copies."""
        for event in self._events:
            self._copies.wait_on_current_stream(event)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _room(self, size: int) -> HostMemory:
        began = time.monotonic()
        self.reserve(size)
        assert self._memory is not None
        try:
            self._memory.wait()
        except Exception:
            self.close()
            raise
        finally:
            self.memory_wait_s = time.monotonic() - began
        return self._memory


def copy_bytes(write_items: Sequence[WriteItem]) -> int:
    """The memory that a copy of `write_items` takes."""
    return sum(_aligned(write_item.bytes) for write_item in write_items)


def _identity(values: torch.Tensor) -> torch.Tensor:
    return values


def _aligned(size: int) -> int:
    """Pieces start at multiples of 64 bytes, so that they can be viewed in any dtype."""
    return (size + 63) // 64 * 64
