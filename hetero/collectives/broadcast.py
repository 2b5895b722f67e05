"""broadcast across vendors."""

from __future__ import annotations

import torch

from hetero.collectives.layout import overlaps
from hetero.collectives.schedule import CallContext, P2PBatch, Schedule, ShardedChunk, overlapped
from hetero.link.base import as_bytes


def broadcast(context: CallContext, memory: torch.Tensor, *, root: int) -> Schedule:
    """Copy the root's contiguous memory into every rank's."""
    if not memory.numel():
        return iter(())
    if context.sizes.copies_directly(context.layout, memory.nbytes):
        return _broadcast_whole(context, memory, root=root)
    return _broadcast_sharded(context, as_bytes(memory), root=root)


def _broadcast_whole(context: CallContext, memory: torch.Tensor, *, root: int) -> Schedule:
    layout, batch = context.layout, P2PBatch(context)
    vendor_root = root
    if layout.vendor_of(root) != layout.vendor:
        vendor_root = layout.partner(root, layout.vendor)
        if layout.rank == vendor_root:
            batch.recv(root, memory)
            yield batch
    elif layout.rank == root:
        for vendor in layout.other_vendors:
            batch.send(layout.partner(root, vendor), memory)
    if context.library is None:
        yield batch
        return
    library_root = layout.vendor_ranks.index(vendor_root)
    work = context.library.broadcast(as_bytes(memory), root=library_root)
    if layout.rank == root:
        yield batch
    work.wait()


def _broadcast_sharded(context: CallContext, flat: torch.Tensor, *, root: int) -> Schedule:
    """For each chunk: scatter in the root's vendor, send shards to the others, gather in each.

    The steps of successive chunks overlap.
    """
    spans = context.sizes.columns(context.layout, flat.numel(), element_size=1)
    ahead = context.sizes.chunks_ahead(len(spans))
    pipeline = [
        _Chunk(context, flat[span.begin : span.end], root=root, ahead=ahead) for span in spans
    ]
    steps = (
        (0, _Chunk.scatter),
        (1, _Chunk.exchange),
        (1 + ahead, _Chunk.all_gather_within),
        (2 + ahead, _Chunk.finish),
    )
    return overlapped(pipeline, steps)


class _Chunk(ShardedChunk):
    """One chunk of a broadcast, as bytes. The steps are called in this order."""

    def __init__(
        self, context: CallContext, target: torch.Tensor, *, root: int, ahead: int
    ) -> None:
        super().__init__(context, target, ahead=ahead)
        self._root, self._source_vendor = root, context.layout.vendor_of(root)

    def scatter(self) -> Schedule:
        """Give each rank of the root's vendor a shard."""
        layout, library = self._context.layout, self._context.library
        if library is not None:
            self._shard = self._padded.new_empty(len(self._span))
            if layout.vendor == self._source_vendor:
                is_root = layout.rank == self._root
                parts = list(self._padded.split(len(self._span))) if is_root else []
                root = layout.vendor_ranks.index(self._root)
                self._library_work = library.scatter(self._shard, parts, root=root)
        yield from ()

    def exchange(self) -> Schedule:
        """Send the shards to the other vendors."""
        self._wait_for_library()
        layout = self._context.layout
        if layout.vendor == self._source_vendor:
            for vendor in layout.other_vendors:
                for index, common in overlaps(self._span, self._spans[vendor]):
                    piece = self._shard[common.relative_to(self._span)]
                    self._batch.send(layout.vendors[vendor][index], piece)
        else:
            for index, common in overlaps(self._span, self._spans[self._source_vendor]):
                piece = self._shard[common.relative_to(self._span)]
                self._batch.recv(layout.vendors[self._source_vendor][index], piece)
        self._start_batch()
        yield from ()
