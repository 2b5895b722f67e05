"""reduce_scatter across vendors: every rank's table is reduced, and each rank keeps its row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero.collectives.all_reduce import all_reduce_direct
from hetero.collectives.layout import (
    Span,
    equal_parts,
    full_segment,
    overlaps,
    pad_to_multiple,
    row_spans,
    share_memory,
)
from hetero.collectives.schedule import CallContext, P2PBatch, Schedule, overlapped
from hetero.collectives.vendor_library import LibraryWork, Reduction, combine_in_order


def reduce_scatter(
    context: CallContext, result: torch.Tensor, flat: torch.Tensor, reduction: Reduction
) -> Schedule:
    """Reduce every rank's `flat`, a table of rows, and leave row r at rank r in `result`.

    The rows for another vendor are first reduce-scattered within this vendor, whose ranks then each
    send what they have.
    """
    length = result.numel()
    if not length:
        return iter(())
    layout, sizes, element_size = context.layout, context.sizes, result.element_size()
    if layout.alignment == 1:  # only the additions overlap with the transfers
        spans = sizes.reduced_chunks(layout, length, element_size=element_size)
    elif sizes.reduces_directly(layout, flat.nbytes):
        return _reduce_scatter_direct(context, result, flat, reduction)
    else:
        spans = sizes.columns(layout, length, element_size=element_size, rows=layout.size)
    ahead = sizes.chunks_ahead(len(spans))
    if context.library is None and len(spans) <= 1 + ahead:
        return _reduce_scatter_between_vendors(context, result, flat, reduction, spans)
    table = flat.view(-1, length)
    pipeline = [
        _Chunk(context, result[s.begin : s.end], table[:, s.begin : s.end], reduction, ahead=ahead)
        for s in spans
    ]
    steps = (
        (0, _Chunk.reduce_scatter_within),
        (1, _Chunk.exchange),
        (1 + ahead, _Chunk.reduce),
    )
    return overlapped(pipeline, steps)


def _reduce_scatter_direct(
    context: CallContext, result: torch.Tensor, flat: torch.Tensor, reduction: Reduction
) -> Schedule:
    """Reduce the whole table at every rank: one operation of the library instead of two."""
    table = flat.clone()
    yield from all_reduce_direct(context, table, reduction)
    result.copy_(table.view(context.layout.size, -1)[context.layout.rank])


def _reduce_scatter_between_vendors(
    context: CallContext,
    result: torch.Tensor,
    flat: torch.Tensor,
    reduction: Reduction,
    spans: Sequence[Span],
) -> Schedule:
    """The part of a vendor's only rank, whose rows are that vendor's partial results.

    It issues all chunks in one call into C, and adds up one while the next are on their way.
    """
    layout, length, unit = context.layout, result.numel(), result.element_size()
    partials = {layout.vendor: flat[layout.rank * length : (layout.rank + 1) * length]}
    # Receive one vendor's partial result into `result`, unless that overlaps what is sent.
    buffer = None if share_memory(full_segment(result), full_segment(flat)) else result
    for vendor in layout.other_vendors:
        partials[vendor], buffer = torch.empty_like(result) if buffer is None else buffer, None
    batches = []
    for span in spans:
        batches.append(batch := P2PBatch(context))
        for rank in layout.remote_ranks:
            batch.send(rank, flat, (rank * length + span.begin) * unit, len(span) * unit)
        for vendor in layout.other_vendors:
            ranks = layout.vendors[vendor]
            for rank, part in zip(ranks, equal_parts(len(span), len(ranks)), strict=True):
                first = (span.begin + part.begin) * unit
                batch.recv(rank, partials[vendor], first, len(part) * unit)
    if len(batches) == 1:
        yield batches[0]
        combine_in_order(reduction, partials, out=result)
        return
    batches[0].issue_with(batches[1:])
    for span, batch in zip(spans, batches, strict=True):
        yield batch
        parts = {vendor: row[span.begin : span.end] for vendor, row in partials.items()}
        combine_in_order(reduction, parts, out=result[span.begin : span.end])


class _Chunk:
    """Some columns of a reduce-scatter. The steps are called in this order."""

    def __init__(
        self,
        context: CallContext,
        result: torch.Tensor,
        table: torch.Tensor,
        reduction: Reduction,
        *,
        ahead: int,
    ) -> None:
        self._context, self._result, self._table = context, result, table
        self._reduction, self._ahead = reduction, ahead
        self._own = table[context.layout.rank]
        self._own_work: LibraryWork | None = None
        self._works: list[LibraryWork] = []
        """The library's work that writes the partial results for other vendors."""
        self._received: dict[int, torch.Tensor] = {}
        self._batch = P2PBatch(context)

    def reduce_scatter_within(self) -> Schedule:
        """Reduce the rows within this vendor; what is not this rank's will be sent."""
        layout, library = self._context.layout, self._context.library
        if library is None:
            for rank in layout.remote_ranks:
                self._batch.send(rank, self._table[rank])
            return
        length = len(self._result)
        for vendor in layout.other_vendors:
            ranks = layout.vendors[vendor]
            rows = pad_to_multiple(self._rows(ranks), len(layout.vendor_ranks))
            spans = equal_parts(len(ranks) * length, len(layout.vendor_ranks))
            span, shard = spans[layout.vendor_rank], rows.new_empty(len(spans[0]))
            self._works.append(library.reduce_scatter(shard, rows, self._reduction))
            for index, common in overlaps(span, row_spans(len(ranks), length)):
                self._batch.send(ranks[index], shard[common.relative_to(span)])
        self._own = self._result.new_empty(length)
        rows = self._rows(layout.vendor_ranks)
        self._own_work = library.reduce_scatter(self._own, rows, self._reduction)
        yield from ()

    def exchange(self) -> Schedule:
        """Send the partial results of other ranks' rows, and receive those of this rank's row."""
        for work in self._works:
            work.wait()
        layout, length = self._context.layout, len(self._result)
        local_size = len(layout.vendor_ranks)
        own_span = row_spans(local_size, length)[layout.vendor_rank]
        for vendor in layout.other_vendors:
            self._received[vendor] = self._result.new_empty(length)
            shards = equal_parts(local_size * length, len(layout.vendors[vendor]))
            for index, common in overlaps(own_span, shards):
                memory = self._received[vendor][common.relative_to(own_span)]
                self._batch.recv(layout.vendors[vendor][index], memory)
        if self._ahead:
            self._batch.start()
        yield from ()

    def reduce(self) -> Schedule:
        yield self._batch
        if self._own_work is not None:
            self._own_work.wait()
        partials = {self._context.layout.vendor: self._own, **self._received}
        combine_in_order(self._reduction, partials, out=self._result)
        # Free the memory now: that of all chunks together is as large as the table.
        self._own, self._received, self._works = self._result, {}, []
        self._batch = P2PBatch(self._context)

    def _rows(self, ranks: Sequence[int]) -> torch.Tensor:
        """The rows of these ranks, flat: a view of the table if they are adjacent in it."""
        if ranks[-1] - ranks[0] == len(ranks) - 1:
            return self._table[ranks[0] : ranks[-1] + 1].reshape(-1)
        return self._table[list(ranks)].reshape(-1)
