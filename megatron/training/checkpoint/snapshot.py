"""A copy of this rank's pieces in host memory, so that training goes on while they are written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from megatron.training.checkpoint.device_copies import DeviceCopies
from megatron.training.checkpoint.host_memory import HostMemory
from megatron.training.checkpoint.stream import Piece

_SPARE_BYTES = 1 << 20
"""Random states are written as text, whose length differs from save to save."""


class Snapshot:
    """Host memory for one copy, kept from save to save and pinned where there is an accelerator.

    The copies run beside the next forward and backward passes; `order_updates` has to be called
    before anything writes to what is copied.
    """

    def __init__(self, copies: DeviceCopies) -> None:
        self._copies = copies
        self._memory: HostMemory | None = None
        self._events: list[torch.cuda.Event | None] = []
        self.memory_wait_s = 0.0
        """For how long the last `take` waited for its memory."""

    def reserve(self, size: int) -> None:
        """Begin to make memory for pieces of `size` bytes in all, in a thread. Returns at once."""
        if self._memory is not None and self._memory.size < size:
            self.close()
        if self._memory is None:
            self._memory = HostMemory(size + _SPARE_BYTES, self._copies)

    def take(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The same pieces with their elements in host memory, once `wait` returns.

        Raises HostMemoryError where there is none; the next call tries again.
        """
        memory = self._room(copy_bytes(pieces))
        after = self._copies.record_event()
        copies, begin = [], 0
        self._events = []
        for piece in pieces:
            end = begin + piece.bytes
            source, done = piece.source().detach().reshape(-1).view(torch.uint8), 0
            for target in memory.spans(begin, end):
                part = source[done : done + target.numel()]
                self._events.append(self._copies.copy(target, part, after=after))
                done += target.numel()
            values = memory.whole(begin, end).view(piece.dtype)
            copies.append(replace(piece, source=partial(_identity, values)))
            begin += _aligned(piece.bytes)
        return copies

    def wait(self) -> None:
        """Block until the copy is whole. On any thread."""
        for event in self._events:
            if event is not None:
                event.synchronize()

    def order_updates(self) -> None:
        """Let what is enqueued from now on come after the copies."""
        for event in self._events:
            self._copies.order_current_stream(event)

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


def copy_bytes(pieces: Sequence[Piece]) -> int:
    """The memory that a copy of `pieces` takes."""
    return sum(_aligned(piece.bytes) for piece in pieces)


def _identity(values: torch.Tensor) -> torch.Tensor:
    return values


def _aligned(size: int) -> int:
    """Pieces start at multiples of 64 bytes, so that they can be viewed in any dtype."""
    return (size + 63) // 64 * 64
