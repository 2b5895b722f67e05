"""all_gather across vendors: every rank's row into the table of every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero.collectives.layout import (
    Segment,
    copy_segment,
    equal_parts,
    full_segment,
    merged_bytes,
    overlaps,
    row_spans,
    same_memory,
    segment_bytes,
    share_memory,
    split_segments,
)
from hetero.collectives.schedule import CallContext, P2PBatch, Schedule, overlapped
from hetero.collectives.vendor_library import LibraryWork
from hetero.link.base import as_bytes


def all_gather(
    context: CallContext,
    rows: Sequence[Segment],
    row: torch.Tensor,
    *,
    table: torch.Tensor | None = None,
) -> Schedule:
    """Copy every rank's row into every rank's `rows`, all of one size.

    A row crosses to each other vendor once, in shards over its ranks, which then all-gather them.

    Args:
        table: the contiguous memory that `rows` are in, in their order, if they are.
    """
    if not row.numel():
        return iter(())
    layout, nbytes = context.layout, len(rows) * row.nbytes
    if layout.alignment > 1 and context.sizes.copies_directly(layout, nbytes):
        return _all_gather_direct(context, rows, row)
    if context.library is None:
        return _all_gather_one_per_vendor(context, rows, row)
    row = as_bytes(row)
    if table is None:
        return _all_gather_into_rows(context, rows, row)
    return _all_gather_into_table(context, as_bytes(table).view(len(rows), -1), row)


def _all_gather_direct(
    context: CallContext, rows: Sequence[Segment], row: torch.Tensor
) -> Schedule:
    """Gather within the vendor, and send every rank the other vendors' rows: the fewest steps."""
    layout, batch, row = context.layout, P2PBatch(context), as_bytes(row)
    blocks = [_block(rows, ranks, row) for ranks in layout.vendors]
    own = blocks[layout.vendor]
    if context.library is not None:
        context.library.all_gather(own, row).wait()
    else:
        own.copy_(row)
    for rank in layout.direct_send_peers:
        batch.send(rank, own)
    for vendor, rank in layout.direct_recv_peers.items():
        batch.recv(rank, blocks[vendor])
    yield batch
    for ranks, block in zip(layout.vendors, blocks, strict=True):
        if not same_memory(rows[ranks[0]], full_segment(block)):
            parts = split_segments(block, [row.nbytes] * len(ranks))
            for rank, part in zip(ranks, parts, strict=True):
                copy_segment(rows[rank], part)


def _block(rows: Sequence[Segment], ranks: Sequence[int], row: torch.Tensor) -> torch.Tensor:
    """Memory for the rows of some ranks: where they are to be, if they are adjacent there."""
    merged = merged_bytes([rows[rank] for rank in ranks])
    return row.new_empty(len(ranks) * row.nbytes) if merged is None else merged


def _all_gather_one_per_vendor(
    context: CallContext, rows: Sequence[Segment], row: torch.Tensor
) -> Schedule:
    """The only rank of its vendor receives each row from its owner."""
    layout, batch, source = context.layout, P2PBatch(context), full_segment(row)
    if any(share_memory(rows[rank], source) for rank in layout.remote_ranks):
        row = row.clone()  # another rank's row would be received into what is being sent
    for span in context.sizes.columns(layout, row.nbytes, element_size=1, rows=len(rows)):
        for vendor in layout.other_vendors:
            ranks = layout.vendors[vendor]
            for rank, part in zip(ranks, equal_parts(len(span), len(ranks)), strict=True):
                batch.send(rank, row, span.begin + part.begin, len(part))
        for rank in layout.remote_ranks:
            memory, offset, _ = rows[rank]
            batch.recv(rank, memory, offset + span.begin, len(span))
    batch.copy(rows[layout.rank], full_segment(row))
    yield batch


def _all_gather_into_rows(
    context: CallContext, rows: Sequence[Segment], row: torch.Tensor
) -> Schedule:
    table = row.new_empty(len(rows), row.numel())
    yield from _all_gather_into_table(context, table, row)
    for target, gathered in zip(rows, table, strict=True):
        segment_bytes(target).copy_(gathered)


def _all_gather_into_table(
    context: CallContext, table: torch.Tensor, row: torch.Tensor
) -> Schedule:
    spans = context.sizes.columns(context.layout, row.numel(), element_size=1, rows=len(table))
    ahead = context.sizes.chunks_ahead(len(spans))
    pipeline = [
        _Chunk(context, table[:, s.begin : s.end], row[s.begin : s.end], ahead=ahead) for s in spans
    ]
    steps = ((0, _Chunk.exchange), (ahead, _Chunk.gather), (ahead + 1, _Chunk.finish))
    return overlapped(pipeline, steps)


class _Chunk:
    """Some columns of an all-gather. The steps are called in this order."""

    def __init__(
        self, context: CallContext, table: torch.Tensor, row: torch.Tensor, *, ahead: int
    ) -> None:
        """`ahead`: how many chunks are in flight beside it."""
        self._context, self._table, self._row, self._ahead = context, table, row, ahead
        self._batch = P2PBatch(context)
        self._own: _VendorRows | None = None
        self._others: list[_VendorRows] = []

    def exchange(self) -> Schedule:
        """Send this row to the other vendors, receive a shard of theirs, and gather the own."""
        layout, length = self._context.layout, self._row.numel()
        local_size = len(layout.vendor_ranks)
        own_span = row_spans(local_size, length)[layout.vendor_rank]
        for vendor in layout.other_vendors:
            ranks = layout.vendors[vendor]
            for index, common in overlaps(own_span, equal_parts(local_size * length, len(ranks))):
                self._batch.send(ranks[index], self._row[common.relative_to(own_span)])
            rows = _VendorRows(self._context, self._table, vendor)
            for index, common in overlaps(rows.span, row_spans(len(ranks), length)):
                self._batch.recv(ranks[index], rows.shard[common.relative_to(rows.span)])
            self._others.append(rows)
        if self._ahead:
            self._batch.start()
        self._own = _VendorRows(self._context, self._table, layout.vendor, shard=self._row)
        self._own.gather()
        yield from ()

    def gather(self) -> Schedule:
        yield self._batch
        for rows in self._others:
            rows.gather()

    def finish(self) -> Schedule:
        assert self._own is not None
        for rows in (self._own, *self._others):
            rows.finish()
        # Free the memory now: that of all chunks together is as large as the table.
        self._own, self._others, self._batch = None, [], P2PBatch(self._context)
        yield from ()


class _VendorRows:
    """The rows of one vendor: a shard at each rank of this vendor until they are gathered."""

    def __init__(
        self,
        context: CallContext,
        table: torch.Tensor,
        vendor: int,
        *,
        shard: torch.Tensor | None = None,
    ) -> None:
        layout = context.layout
        self._library, self._ranks, self._table = context.library, layout.vendors[vendor], table
        count = len(self._ranks) * table.shape[1]
        spans = equal_parts(count, len(layout.vendor_ranks))
        self.span = spans[layout.vendor_rank]
        # The library gathers shards of one length, of which the last may be filled in part.
        self.shard = table.new_empty(len(spans[0])) if shard is None else shard
        total = len(spans) * len(spans[0])
        first, last = self._ranks[0], self._ranks[-1]
        is_block = table.is_contiguous() and last - first == len(self._ranks) - 1
        self._is_in_place = is_block and total == count
        self._gathered = (
            table[first : last + 1].view(-1) if self._is_in_place else table.new_empty(total)
        )
        self._work: LibraryWork | None = None

    def gather(self) -> None:
        assert self._library is not None
        self._work = self._library.all_gather(self._gathered, self.shard)

    def finish(self) -> None:
        assert self._work is not None
        self._work.wait()
        if not self._is_in_place:
            length = self._table.shape[1]
            rows = self._gathered[: len(self._ranks) * length].view(-1, length)
            for rank, gathered in zip(self._ranks, rows, strict=True):
                self._table[rank].copy_(gathered)
