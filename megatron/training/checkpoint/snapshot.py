"""A copy of this rank's pieces in host memory, so that training goes on while they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from hetero.device.base import DeviceRuntime, Mark
from megatron.training.checkpoint.stream import Piece


class Snapshot:
    """Host memory for one copy, kept from save to save and pinned where there is an accelerator.

    The copies run beside the next forward and backward passes; `order_updates` has to be called
    before anything writes to what is copied.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._memory: torch.Tensor | None = None
        self._marks: list[Mark] = []

    def take(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The same pieces with their elements in host memory, once `wait` returns."""
        memory = self._room(sum(_aligned(piece.bytes) for piece in pieces))
        after = self._runtime.mark()
        copies, at = [], 0
        self._marks = []
        for piece in pieces:
            source = piece.source().detach().reshape(-1)
            target = memory[at : at + piece.bytes]
            at += _aligned(piece.bytes)
            mark = self._runtime.copy(target, source.view(torch.uint8), after=after)
            self._marks.append(mark)
            values = target.view(piece.dtype)
            copies.append(replace(piece, source=partial(_identity, values)))
        return copies

    def wait(self) -> None:
        """Block until the copy is whole. On any thread."""
        for mark in self._marks:
            mark.synchronize()

    def order_updates(self) -> None:
        """Let what is enqueued from now on come after the copies."""
        for mark in self._marks:
            mark.order_current_stream()

    def close(self) -> None:
        if self._memory is not None:
            self._runtime.unregister(self._memory)
            self._memory = None

    def _room(self, size: int) -> torch.Tensor:
        if self._memory is None or self._memory.numel() < size:
            self.close()
            memory = torch.empty(max(size, 1), dtype=torch.uint8)
            self._runtime.register(memory)
            self._memory = memory
        return self._memory


def _identity(values: torch.Tensor) -> torch.Tensor:
    return values


def _aligned(size: int) -> int:
    """Pieces start at multiples of 64 bytes, so that they can be viewed in any dtype."""
    return (size + 63) // 64 * 64
