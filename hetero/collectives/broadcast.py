"""broadcast across vendors: small tensors whole, large ones in shards over all ranks."""

from __future__ import annotations

import torch

from hetero.collectives.all_reduce import DIRECT_BYTES
from hetero.collectives.group_links import as_bytes
from hetero.collectives.memory_segments import pad_to_multiple
from hetero.collectives.p2p_batch import CallContext, P2PBatch, Schedule
from hetero.collectives.vendor_layout import equal_parts, overlaps


def broadcast(context: CallContext, memory: torch.Tensor, *, root: int) -> Schedule:
    """Copy the root's contiguous memory into every rank's."""
    if not memory.numel():
        return iter(())
    if memory.nbytes <= DIRECT_BYTES:
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
        if context.library is not None:
            batch.start()
    if context.library is not None:
        library_root = layout.vendor_ranks.index(vendor_root)
        context.library.broadcast(as_bytes(memory), root=library_root).wait()
    yield batch


def _broadcast_sharded(context: CallContext, flat: torch.Tensor, *, root: int) -> Schedule:
    """Scatter within the root's vendor, send shards to the others, all-gather within each."""
    layout, library = context.layout, context.library
    padded = pad_to_multiple(flat, layout.alignment)
    spans = [equal_parts(padded.numel(), len(ranks)) for ranks in layout.vendors]
    span = spans[layout.vendor][layout.vendor_rank]
    source_vendor = layout.vendor_of(root)
    shard = padded if library is None else padded.new_empty(len(span))
    batch = P2PBatch(context)
    if layout.vendor == source_vendor:
        if library is not None:
            parts = list(padded.split(len(span))) if layout.rank == root else []
            library.scatter(shard, parts, root=layout.vendor_ranks.index(root)).wait()
        for vendor in layout.other_vendors:
            for index, common in overlaps(span, spans[vendor]):
                piece = shard[common.relative_to(span)]
                batch.send(layout.vendors[vendor][index], piece)
        if library is not None:
            batch.start()
    else:
        for index, common in overlaps(span, spans[source_vendor]):
            piece = shard[common.relative_to(span)]
            batch.recv(layout.vendors[source_vendor][index], piece)
        yield batch
    if library is not None:
        library.all_gather(padded, shard).wait()
    yield batch
    if padded is not flat:
        flat.copy_(padded[: flat.numel()])
