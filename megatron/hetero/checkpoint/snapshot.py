"""A copy of this rank's state in host memory, so that training continues while it is written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from megatron.hetero.checkpoint.device_to_host import DeviceToHostCopier
from megatron.hetero.checkpoint.host_memory import HostMemory
from megatron.hetero.checkpoint.safetensors_writer import WriteItem

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

        Raises HostMemoryError if memory is short; the next call tries again.
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
