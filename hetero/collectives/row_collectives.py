"""Collectives with a row for each rank: all_gather, reduce_scatter, all_to_all.

A table is a tensor of such rows, in the order of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetero.collectives.all_reduce import (
    CHUNKS_AHEAD,
    DIRECT_BYTES,
    chunk_length,
    combine_in_order,
)
from hetero.collectives.group_links import as_bytes
from hetero.collectives.intra_vendor import LibraryWork
from hetero.collectives.memory_segments import (
    Segment,
    copy_segment,
    full_segment,
    merged_bytes,
    pad_to_multiple,
    same_memory,
    segment_bytes,
    share_memory,
)
from hetero.collectives.p2p_batch import CallContext, P2PBatch, Schedule
from hetero.collectives.reductions import Reduction
from hetero.collectives.vendor_layout import Span, chunks, equal_parts, overlaps
from hetero.errors import LinkError
from hetero.formatting import counted

_COPY_FIRST_BYTES = {"cpu": DIRECT_BYTES, "cuda": 32 << 20}
"""Up to this size a rank's own row is copied before the batch is issued, which then takes one call
into C. A GPU copies this in 25 us, less than issuing the batch separately takes in Python.
"""


def _row_spans(count: int, length: int) -> list[Span]:
    return [Span(row * length, (row + 1) * length) for row in range(count)]


def _adjacent_rows(table: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor | None:
    """The rows of a vendor as a flat view of the table; None if they are not adjacent in it."""
    if ranks[-1] - ranks[0] != len(ranks) - 1:
        return None
    return table[ranks[0] : ranks[-1] + 1].reshape(-1)


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
    if context.library is None:
        return _all_gather_one_per_vendor(context, rows, row)
    row = as_bytes(row)
    if table is None:
        return _all_gather_into_rows(context, rows, row)
    return _all_gather_into_table(context, as_bytes(table).view(len(rows), -1), row)


def _all_gather_one_per_vendor(
    context: CallContext, rows: Sequence[Segment], row: torch.Tensor
) -> Schedule:
    """The only rank of its vendor receives each row from its owner."""
    layout, batch, source = context.layout, P2PBatch(context), full_segment(row)
    if any(share_memory(rows[rank], source) for rank in layout.remote_ranks):
        row = row.clone()  # another rank's row would be received into what is being sent
    for vendor in layout.other_vendors:
        for rank, offset, nbytes in _shards(row.nbytes, layout.vendors[vendor]):
            batch.send(rank, row, offset, nbytes)
    for rank in layout.remote_ranks:
        batch.recv(rank, *rows[rank])
    _copy_own(batch, rows[layout.rank], full_segment(row))
    yield batch


def _shards(nbytes: int, ranks: Sequence[int], *, unit: int = 1) -> list[tuple[int, int, int]]:
    """A row split over the ranks of another vendor: rank, offset and size in bytes."""
    if len(ranks) == 1:
        return [(ranks[0], 0, nbytes)]
    spans = equal_parts(nbytes // unit, len(ranks))
    return [(rank, s.begin * unit, len(s) * unit) for rank, s in zip(ranks, spans, strict=True)]


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
    layout, library, length = context.layout, context.library, row.numel()
    assert library is not None
    sends, local_size = P2PBatch(context), len(layout.vendor_ranks)
    own_span = _row_spans(local_size, length)[layout.vendor_rank]
    for vendor in layout.other_vendors:
        ranks = layout.vendors[vendor]
        for index, common in overlaps(own_span, equal_parts(local_size * length, len(ranks))):
            sends.send(ranks[index], row[common.relative_to(own_span)])
    sends.start()
    others = [_OtherVendorsRows(context, table, vendor, length) for vendor in layout.other_vendors]
    view = _adjacent_rows(table, layout.vendor_ranks)
    gathered = row.new_empty(local_size * length) if view is None else view
    work = library.all_gather(gathered, row)
    for rows in others:
        yield from rows.all_gather()
    work.wait()
    if view is None:
        table[list(layout.vendor_ranks)] = gathered.view(local_size, length)
    for rows in others:
        rows.finish()
    yield sends


class _OtherVendorsRows:
    """The rows of another vendor: each rank receives a shard of them, and its vendor gathers it."""

    def __init__(self, context: CallContext, table: torch.Tensor, vendor: int, length: int) -> None:
        layout = context.layout
        self._context, self._table = context, table
        self._ranks, self._length = layout.vendors[vendor], length
        spans = equal_parts(len(self._ranks) * length, len(layout.vendor_ranks))
        span = spans[layout.vendor_rank]
        # The library gathers shards of one length, of which the last may be filled in part.
        self._shard = table.new_empty(len(spans[0]))
        total = len(layout.vendor_ranks) * len(spans[0])
        view = _adjacent_rows(table, self._ranks)
        self._is_view = view is not None and view.numel() == total
        self._gathered = view if view is not None and self._is_view else table.new_empty(total)
        self._work: LibraryWork | None = None
        self._receives = P2PBatch(context)
        for index, common in overlaps(span, _row_spans(len(self._ranks), length)):
            self._receives.recv(self._ranks[index], self._shard[common.relative_to(span)])
        self._receives.start()

    def all_gather(self) -> Schedule:
        yield self._receives
        if (library := self._context.library) is not None:
            self._work = library.all_gather(self._gathered, self._shard)

    def finish(self) -> None:
        if self._work is not None:
            self._work.wait()
        if not self._is_view:
            rows = self._gathered[: len(self._ranks) * self._length]
            self._table[list(self._ranks)] = rows.view(len(self._ranks), self._length)


def reduce_scatter(
    context: CallContext, result: torch.Tensor, flat: torch.Tensor, reduction: Reduction
) -> Schedule:
    """Reduce every rank's `flat`, a table of rows, and leave row r at rank r in `result`.

    The rows for another vendor are first reduce-scattered within this one, whose ranks then each
    send what they have.
    """
    length = result.numel()
    if not length:
        return iter(())
    # The rows of a vendor's only rank are that vendor's partial results.
    if context.library is None and length <= chunk_length(context, result):
        return _reduce_scatter_one_step(context, result, flat, reduction)
    return _reduce_scatter_chunked(context, result, flat.view(-1, length), reduction)


def _reduce_scatter_chunked(
    context: CallContext, result: torch.Tensor, table: torch.Tensor, reduction: Reduction
) -> Schedule:
    layout, length, library = context.layout, result.numel(), context.library
    if library is None:
        partials = [_Partial(rank, Span(0, length), table[rank]) for rank in layout.remote_ranks]
        yield from _exchange_partials(context, result, table[layout.rank], partials, reduction)
        return
    partials, works = [], []
    for vendor in layout.other_vendors:
        ranks = layout.vendors[vendor]
        rows = pad_to_multiple(_rows(table, ranks), len(layout.vendor_ranks))
        spans = equal_parts(len(ranks) * length, len(layout.vendor_ranks))
        span = spans[layout.vendor_rank]
        reduced = rows.new_empty(len(spans[0]))
        works.append(library.reduce_scatter(reduced, rows, reduction))
        for index, common in overlaps(span, _row_spans(len(ranks), length)):
            row_span = common.shifted(-index * length)
            memory = reduced[common.relative_to(span)]
            partials.append(_Partial(ranks[index], row_span, memory))
    own = result.new_empty(length)
    own_work = library.reduce_scatter(own, _rows(table, layout.vendor_ranks), reduction)
    for work in works:
        work.wait()
    yield from _exchange_partials(context, result, own, partials, reduction, own_work=own_work)


def _reduce_scatter_one_step(
    context: CallContext, result: torch.Tensor, flat: torch.Tensor, reduction: Reduction
) -> Schedule:
    """One batch for all of it, so that Python issues once."""
    layout, batch = context.layout, P2PBatch(context)
    length, nbytes = result.numel(), result.nbytes
    partials = {layout.vendor: flat[layout.rank * length : (layout.rank + 1) * length]}
    for rank in layout.remote_ranks:
        batch.send(rank, flat, rank * nbytes, nbytes)
    # Receive one vendor's partial result into `result`, unless that overlaps what is sent.
    buffer = None if share_memory(full_segment(result), full_segment(flat)) else result
    for vendor in layout.other_vendors:
        partial, buffer = torch.empty_like(result) if buffer is None else buffer, None
        partials[vendor] = partial
        unit = nbytes // length
        for rank, offset, size in _shards(nbytes, layout.vendors[vendor], unit=unit):
            batch.recv(rank, partial, offset, size)
    yield batch
    combine_in_order(reduction, partials, out=result)


@dataclass(frozen=True)
class _Partial:
    """A part of this vendor's partial result that goes to a rank of another vendor."""

    rank: int
    span: Span
    """Within that rank's row."""
    memory: torch.Tensor


def _rows(table: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor:
    """The rows of a vendor, flat: a view of the table if they are adjacent in it."""
    view = _adjacent_rows(table, ranks)
    return table[list(ranks)].reshape(-1) if view is None else view


def _exchange_partials(
    context: CallContext,
    result: torch.Tensor,
    own: torch.Tensor,
    partials: Sequence[_Partial],
    reduction: Reduction,
    *,
    own_work: LibraryWork | None = None,
) -> Schedule:
    """Send `partials`, receive those for this rank, and reduce them with `own` into `result`.

    In chunks: one is reduced while the next are in flight.

    Args:
        own_work: what writes `own`.
    """
    layout, length, local_size = context.layout, len(own), len(context.layout.vendor_ranks)
    own_span = _row_spans(local_size, length)[layout.vendor_rank]
    sources = [
        (vendor, layout.vendors[vendor][index], common.shifted(-own_span.begin))
        for vendor in layout.other_vendors
        for index, common in overlaps(
            own_span, equal_parts(local_size * length, len(layout.vendors[vendor]))
        )
    ]
    spans = chunks(length, length=chunk_length(context, own), alignment=1)
    ahead = CHUNKS_AHEAD[own.device.type]
    in_flight: deque[tuple[P2PBatch, dict[int, torch.Tensor]]] = deque()
    for step in range(len(spans) + ahead):
        if step < len(spans):
            span, batch = spans[step], P2PBatch(context)
            for part in partials:
                common = part.span.intersect(span)
                batch.send(part.rank, part.memory[common.relative_to(part.span)])
            received = {vendor: own.new_empty(len(span)) for vendor in layout.other_vendors}
            for vendor, rank, source_span in sources:
                common = source_span.intersect(span)
                batch.recv(rank, received[vendor][common.relative_to(span)])
            if len(spans) > 1:
                batch.start()
            in_flight.append((batch, received))
        if step == ahead and own_work is not None:
            own_work.wait()
        if step >= ahead:
            batch, received = in_flight.popleft()
            yield batch
            span = spans[step - ahead]
            received[layout.vendor] = own[span.begin : span.end]
            combine_in_order(reduction, received, out=result[span.begin : span.end])


def all_to_all(
    context: CallContext, outputs: Sequence[Segment], inputs: Sequence[Segment]
) -> Schedule:
    """Send inputs[r] to rank r and receive outputs[r] from it; of any sizes."""
    layout, batch = context.layout, P2PBatch(context)
    for rank in layout.remote_ranks:
        batch.send(rank, *inputs[rank])
        batch.recv(rank, *outputs[rank])
    if context.library is None:
        _copy_own(batch, outputs[layout.rank], inputs[layout.rank])
        yield batch
        return
    batch.start()
    targets = [outputs[rank] for rank in layout.vendor_ranks]
    sources = [inputs[rank] for rank in layout.vendor_ranks]
    output_splits, input_splits = ([size for _, _, size in part] for part in (targets, sources))
    send_buffer, view = merged_bytes(sources), merged_bytes(targets)
    if send_buffer is None:
        send_buffer = torch.cat([segment_bytes(source) for source in sources])
    recv_buffer = send_buffer.new_empty(sum(output_splits)) if view is None else view
    if recv_buffer.is_cpu:
        _require_same_sizes(context, output_splits=output_splits, input_splits=input_splits)
    context.library.all_to_all(
        recv_buffer, send_buffer, output_splits=output_splits, input_splits=input_splits
    ).wait()
    if view is None:
        for target, part in zip(targets, recv_buffer.split(output_splits), strict=True):
            segment_bytes(target).copy_(part)
    yield batch


def _require_same_sizes(
    context: CallContext, *, output_splits: list[int], input_splits: list[int]
) -> None:
    """Compare the sizes within this vendor: gloo aborts a process that receives more than it asked.

    Raises LinkError, which names the rank whose input differs from this rank's output.
    """
    layout, library, ones = context.layout, context.library, [1] * len(input_splits)
    assert library is not None
    sent = torch.empty(len(input_splits), dtype=torch.int64, device="cpu")
    own = torch.tensor(input_splits, device="cpu")
    library.all_to_all(sent, own, output_splits=ones, input_splits=ones).wait()
    for rank, given, taken in zip(layout.vendor_ranks, sent.tolist(), output_splits, strict=True):
        if given != taken:
            raise LinkError(
                f"{layout.members[rank]} gives {counted(given, 'byte')} to "
                f"{layout.members[layout.rank]}, which takes {taken}; make both the same"
            )


def _copy_own(batch: P2PBatch, target: Segment, source: Segment) -> None:
    """Copy what this rank has for itself: before a small batch is issued, during a large one."""
    if not same_memory(target, source):
        if source[2] > _COPY_FIRST_BYTES[source[0].device.type]:
            batch.start()
        copy_segment(target, source)
