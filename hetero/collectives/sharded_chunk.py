"""A chunk of one tensor, of which each rank of a vendor has a shard meanwhile."""

from __future__ import annotations

import torch

from hetero.collectives.intra_vendor import LibraryWork
from hetero.collectives.memory_segments import pad_to_multiple
from hetero.collectives.p2p_batch import CallContext, P2PBatch, Schedule
from hetero.collectives.vendor_layout import equal_parts


class ShardedChunk:
    """What all_reduce and broadcast have in common: how a chunk begins, and how it ends.

    Derived classes add the steps between, which fill the shards.
    """

    def __init__(self, context: CallContext, target: torch.Tensor, *, ahead: int) -> None:
        """`ahead`: how many chunks are in flight beside it."""
        layout = context.layout
        self._context, self._target, self._ahead = context, target, ahead
        self._padded = pad_to_multiple(target, layout.alignment)
        self._spans = tuple(
            equal_parts(self._padded.numel(), len(ranks)) for ranks in layout.vendors
        )
        self._span = self._spans[layout.vendor][layout.vendor_rank]
        self._shard = self._padded
        self._library_work: LibraryWork | None = None
        self._batch = P2PBatch(context)

    def all_gather_within(self) -> Schedule:
        """Once the shards have come, gather those of this vendor."""
        yield self._batch
        if (library := self._context.library) is not None:
            self._library_work = library.all_gather(self._padded, self._shard)

    def finish(self) -> Schedule:
        self._wait_for_library()
        if self._padded is not self._target:
            self._target.copy_(self._padded[: self._target.numel()])
        # Free the memory now: that of all chunks together is as large as the tensor.
        self._padded = self._shard = self._target
        self._batch = P2PBatch(self._context)
        yield from ()

    def _start_batch(self) -> None:
        if self._ahead:
            self._batch.start()

    def _wait_for_library(self) -> None:
        if self._library_work is not None:
            self._library_work.wait()
            self._library_work = None
