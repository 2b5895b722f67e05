"""all_reduce and reduce across vendors."""

from __future__ import annotations

import torch

from hetero.collectives.overlapped_steps import chunk_spans, chunks_ahead, overlapped
from hetero.collectives.p2p_batch import CallContext, P2PBatch, Schedule
from hetero.collectives.reductions import Reduction, combine_in_order
from hetero.collectives.sharded_chunk import ShardedChunk
from hetero.collectives.vendor_layout import Piece, shared_pieces

_DIRECT_BYTES = 64 << 10
_DIRECT_BYTES_ON_GPUS_OF_ONE_HOST = 32 << 20
_DIRECT_BYTES_ONE_PER_VENDOR = {"cpu": 1 << 20, "cuda": 64 << 20}


def direct_bytes(context: CallContext) -> int:
    """Up to this size the algorithm with the fewest steps is the fastest.

    With it every rank gets the other vendors' whole part: of a reduction, or of a table of rows.
    """
    layout, kind = context.layout, context.device.type
    if layout.alignment == 1:
        return _DIRECT_BYTES_ONE_PER_VENDOR[kind]
    if kind == "cuda" and not layout.has_several_hosts:
        return _DIRECT_BYTES_ON_GPUS_OF_ONE_HOST
    return _DIRECT_BYTES


def all_reduce(context: CallContext, flat: torch.Tensor, reduction: Reduction) -> Schedule:
    """Reduce flat memory in place."""
    if not flat.numel():
        return iter(())
    if flat.nbytes <= direct_bytes(context):
        return all_reduce_direct(context, flat, reduction)
    return _all_reduce_sharded(context, flat, reduction)


def all_reduce_direct(context: CallContext, flat: torch.Tensor, reduction: Reduction) -> Schedule:
    """Reduce flat memory in place, all of it at every rank: the fewest steps."""
    layout, batch = context.layout, P2PBatch(context)
    if context.library is not None:
        context.library.all_reduce(flat, reduction.op).wait()
    partials = {layout.vendor: flat}
    for rank in layout.direct_send_peers:
        batch.send(rank, flat)
    for vendor, rank in layout.direct_recv_peers.items():
        partials[vendor] = torch.empty_like(flat)
        batch.recv(rank, partials[vendor])
    yield batch
    combine_in_order(reduction, partials, out=flat)


def _all_reduce_sharded(context: CallContext, flat: torch.Tensor, reduction: Reduction) -> Schedule:
    """For each chunk: reduce-scatter within the vendor and then across, all-gather likewise.

    The steps of successive chunks overlap.
    """
    spans = chunk_spans(context, flat.numel(), element_size=flat.element_size())
    ahead = chunks_ahead(context, len(spans))
    pipeline = [
        _Chunk(context, flat[span.begin : span.end], reduction, ahead=ahead) for span in spans
    ]
    steps = (
        (0, _Chunk.reduce_scatter_within),
        (1, _Chunk.send_partials),
        (1 + ahead, _Chunk.reduce),
        (1 + 2 * ahead, _Chunk.all_gather_within),
        (2 + 2 * ahead, _Chunk.finish),
    )
    return overlapped(pipeline, steps)


class _Chunk(ShardedChunk):
    """One chunk of an all-reduce, whose steps are called in this order. Each waits for the last."""

    def __init__(
        self, context: CallContext, target: torch.Tensor, reduction: Reduction, *, ahead: int
    ) -> None:
        super().__init__(context, target, ahead=ahead)
        self._reduction = reduction
        self._pieces = shared_pieces(self._span, self._spans)
        self._partials: list[dict[int, torch.Tensor]] = []

    def reduce_scatter_within(self) -> Schedule:
        """Leave this vendor's partial result of a shard here."""
        if (library := self._context.library) is not None:
            self._shard = self._padded.new_empty(len(self._span))
            self._library_work = library.reduce_scatter(self._shard, self._padded, self._reduction)
        yield from ()

    def send_partials(self) -> Schedule:
        """Send the other vendors the parts that they reduce, and receive those for this rank."""
        self._wait_for_library()
        for piece in self._pieces:
            own = self._part(piece, self._context.layout.vendor)
            partials = {self._context.layout.vendor: own}
            for vendor, rank in self._others(piece):
                partials[vendor] = torch.empty_like(own)
                self._batch.recv(rank, partials[vendor])
                self._batch.send(rank, self._part(piece, vendor))
            self._partials.append(partials)
        self._start_batch()
        yield from ()

    def reduce(self) -> Schedule:
        """Reduce this rank's parts, and send them to the other vendors as they send theirs."""
        yield self._batch
        self._batch = P2PBatch(self._context)
        for piece, partials in zip(self._pieces, self._partials, strict=True):
            own = partials[self._context.layout.vendor]
            combine_in_order(self._reduction, partials, out=own)
            for vendor, rank in self._others(piece):
                self._batch.recv(rank, self._part(piece, vendor))
                self._batch.send(rank, own)
        self._partials = []
        self._start_batch()

    def _part(self, piece: Piece, vendor: int) -> torch.Tensor:
        """The part of a piece that a vendor reduces."""
        return self._shard[piece.parts[vendor].relative_to(self._span)]

    def _others(self, piece: Piece) -> list[tuple[int, int]]:
        """The other vendors, each with its rank that has the piece."""
        layout = self._context.layout
        return [
            (vendor, layout.vendors[vendor][piece.holders[vendor]])
            for vendor in layout.other_vendors
        ]


def reduce(
    context: CallContext, flat: torch.Tensor, reduction: Reduction, *, root: int
) -> Schedule:
    """Reduce flat memory in place; it holds the result at `root` and is scratch elsewhere.

    Each other vendor reduces to the root's partner, which sends to the root.
    """
    layout, batch = context.layout, P2PBatch(context)
    is_roots_vendor = layout.vendor_of(root) == layout.vendor
    vendor_root = root if is_roots_vendor else layout.partner(root, layout.vendor)
    if context.library is not None:
        context.library.reduce(
            flat, reduction.op, root=layout.vendor_ranks.index(vendor_root)
        ).wait()
    if layout.rank != vendor_root:
        return
    if layout.rank != root:
        batch.send(root, flat)
        yield batch
        return
    partials = {layout.vendor: flat}
    for vendor in layout.other_vendors:
        partials[vendor] = torch.empty_like(flat)
        batch.recv(layout.partner(root, vendor), partials[vendor])
    yield batch
    combine_in_order(reduction, partials, out=flat)
