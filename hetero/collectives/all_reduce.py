"""all_reduce and reduce across vendors."""

from __future__ import annotations

from collections.abc import Generator

import torch

from hetero.collectives.all_gather import all_gather
from hetero.collectives.layout import Piece, equal_segments, materialize, shared_pieces
from hetero.collectives.schedule import (
    CallContext,
    P2PBatch,
    Schedule,
    ShardedChunk,
    overlapped,
)
from hetero.collectives.vendor_library import Reduction, combine_in_order


def all_reduce(context: CallContext, flat: torch.Tensor, reduction: Reduction) -> Schedule:
    """Reduce flat memory in place."""
    if not flat.numel():
        return iter(())
    if context.sizes.reduces_directly(context.layout, flat.nbytes):
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
    spans = context.sizes.reduced_chunks(
        context.layout, flat.numel(), element_size=flat.element_size()
    )
    ahead = context.sizes.chunks_ahead(len(spans))
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


def require_sum(reduction: Reduction) -> None:
    """Refuse any other reduction of sparse tensors, before anything is sent."""
    if reduction.kernel != "SUM" or reduction.factor is not None:
        raise NotImplementedError(
            f"there is no reduction {reduction.name} of sparse tensors; take SUM"
        )


def all_reduce_sparse(context: CallContext, tensor: torch.Tensor, reduction: Reduction) -> Schedule:
    """Sum a sparse COO tensor over all ranks, in the order of ranks, in place.

    Indices and values are all-gathered, and each rank adds them up.
    """
    own = tensor.coalesce()
    nnz = torch.tensor([own._nnz()], device=tensor.device)
    counts = (yield from _gathered(context, nnz)).view(-1).tolist()
    longest = max(counts)
    indices, values = own.indices(), own.values()
    missing = longest - own._nnz()
    all_indices = yield from _gathered(context, _padded(indices.t().contiguous(), missing))
    all_values = yield from _gathered(context, _padded(values, missing))
    total = None
    for rank, count in enumerate(counts):
        part = torch.sparse_coo_tensor(
            all_indices[rank, :count].t(), all_values[rank, :count], tensor.shape
        )
        total = part if total is None else total + part
    assert total is not None
    result = total.coalesce()
    tensor.copy_(result / reduction.size if reduction.averages else result)


def _padded(tensor: torch.Tensor, missing: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def _gathered(
    context: CallContext, tensor: torch.Tensor
) -> Generator[P2PBatch, None, torch.Tensor]:
    """Every rank's tensor, all of one shape, stacked along a new first dimension."""
    size = context.layout.size
    table = tensor.new_empty((size, *tensor.shape))
    pieces = equal_segments(table, size)
    yield from all_gather(context, pieces, materialize(tensor), table=table)
    return table
