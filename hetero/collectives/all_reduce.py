"""Reductions over vendors whose result goes to every rank, or to one."""

from __future__ import annotations

import torch

from hetero.collectives.exchange import Exchange, Moves, Steps
from hetero.collectives.inside_vendor import Inside
from hetero.collectives.reductions import Reduction
from hetero.collectives.vendor_layout import Span, chunks, equal_parts, overlaps

DIRECT_BYTES = 64 << 10
"""Up to here every rank takes the other vendors' whole partial result: fewest steps."""
CHUNK_BYTES = 4 << 20
"""On a CPU, where a chunk that was just received is still in the cache when it is added up."""
_GPU_CHUNK_BYTES, _GPU_CHUNKS = (32 << 20, 128 << 20), 4
"""The least and the most on a GPU, while another chunk is reduced inside the vendor."""
_GPU_CHUNK_BYTES_ALONE = 256 << 20
"""Where no vendor has a second rank. Only the additions hide behind the other chunks' crossing, and
for Python to ask for one more chunk takes as long as they do."""
CHUNKS_AHEAD = {"cpu": 1, "cuda": 3}
"""How many chunks are on their way to the peers when the next one is added up.

A transfer begins behind all that the caller's stream was given, so a GPU's may not come after the
additions of chunks shortly before it; the CPU is to find in its cache what it adds.
"""


def all_reduce(exchange: Exchange, flat: torch.Tensor, reduction: Reduction) -> Steps:
    """Reduce flat memory in place."""
    if not flat.numel():
        return iter(())
    # Where no vendor has a second rank there are no shards, and one chunk is nothing to overlap.
    alone = exchange.layout.grain == 1
    if flat.nbytes <= DIRECT_BYTES or (alone and flat.numel() <= chunk_length(exchange, flat)):
        return _directly(exchange, flat, reduction)
    return _in_shards(exchange, flat, reduction)


def combine_in_order(
    reduction: Reduction, partials: dict[int, torch.Tensor], *, out: torch.Tensor
) -> None:
    """Join partial results by vendor, in vendor order. `out` may be the memory of one of them."""
    first, *others = [partials[vendor] for vendor in sorted(partials)]
    if len(others) == 1:
        reduction.combine(first, others[0], out=out)
        return
    joined = torch.empty_like(first)
    reduction.combine(first, others[0], out=joined)
    for other in others[1:]:
        reduction.combine(joined, other, out=joined)
    out.copy_(joined)


def _directly(exchange: Exchange, flat: torch.Tensor, reduction: Reduction) -> Steps:
    layout, moves = exchange.layout, Moves(exchange)
    if exchange.library is not None:
        exchange.library.all_reduce(flat, reduction.op).wait()
    partials = {layout.vendor: flat}
    for rank in layout.takers:
        moves.send(rank, flat)
    for vendor, rank in layout.givers.items():
        partials[vendor] = torch.empty_like(flat)
        moves.recv(rank, partials[vendor])
    yield moves
    combine_in_order(reduction, partials, out=flat)


def _in_shards(exchange: Exchange, flat: torch.Tensor, reduction: Reduction) -> Steps:
    """Chunk by chunk: reduce-scatter inside, exchange between, all-gather inside, overlapped."""
    layout = exchange.layout
    parts = [
        _Chunk(exchange, flat[span.begin : span.end], reduction)
        for span in chunks(flat.numel(), length=chunk_length(exchange, flat), grain=layout.grain)
    ]
    gathers = 1 + CHUNKS_AHEAD[flat.device.type]
    for step in range(len(parts) + gathers + 1):
        if step < len(parts):
            parts[step].reduce()
        if 0 <= step - 1 < len(parts):
            parts[step - 1].cross()
        if 0 <= step - gathers < len(parts):
            yield from parts[step - gathers].gather()
        if 0 <= step - gathers - 1 < len(parts):
            parts[step - gathers - 1].finish()


def chunk_length(exchange: Exchange, flat: torch.Tensor) -> int:
    """How many elements cross at a time while others are added up: the same on every rank."""
    if flat.is_cpu:
        nbytes = CHUNK_BYTES
    elif exchange.layout.grain == 1:
        nbytes = _GPU_CHUNK_BYTES_ALONE
    else:
        least, most = _GPU_CHUNK_BYTES
        nbytes = min(max(least, flat.nbytes // _GPU_CHUNKS), most)
    return nbytes // flat.element_size()


class _Chunk:
    """One chunk on its way through the three steps; each begins its own and awaits the former."""

    def __init__(self, exchange: Exchange, target: torch.Tensor, reduction: Reduction) -> None:
        layout = exchange.layout
        self._exchange, self._target, self._reduction = exchange, target, reduction
        missing = -target.numel() % layout.grain
        self._whole = torch.nn.functional.pad(target, (0, missing)) if missing else target
        self._spans = [equal_parts(self._whole.numel(), len(ranks)) for ranks in layout.vendors]
        self._span: Span = self._spans[layout.vendor][layout.place]
        self._shard = self._whole
        self._inside: Inside | None = None
        self._moves = Moves(exchange)
        self._partials: dict[int, torch.Tensor] = {}

    def reduce(self) -> None:
        if (library := self._exchange.library) is not None:
            self._shard = self._whole.new_empty(len(self._span))
            self._inside = library.reduce_scatter(self._shard, self._whole, self._reduction)

    def cross(self) -> None:
        self._await_inside()
        layout = self._exchange.layout
        self._partials = {layout.vendor: self._shard}
        meetings = [
            (vendor, layout.vendors[vendor][place], common.within(self._span))
            for vendor in layout.others
            for place, common in overlaps(self._span, self._spans[vendor])
        ]
        for vendor, rank, piece in meetings:
            partial = self._partials.setdefault(vendor, torch.empty_like(self._shard))
            self._moves.recv(rank, partial[piece])
        for _, rank, piece in meetings:
            self._moves.send(rank, self._shard[piece])
        self._moves.begin()

    def gather(self) -> Steps:
        yield self._moves
        combine_in_order(self._reduction, self._partials, out=self._shard)
        if (library := self._exchange.library) is not None:
            self._inside = library.all_gather(self._whole, self._shard)

    def finish(self) -> None:
        self._await_inside()
        if self._whole is not self._target:
            self._target.copy_(self._whole[: self._target.numel()])
        # Other chunks are still on their way, and all of these together are as large as the tensor.
        self._whole = self._shard = self._target
        self._moves = Moves(self._exchange)
        self._partials = {}

    def _await_inside(self) -> None:
        if self._inside is not None:
            self._inside.wait()
            self._inside = None


def reduce(exchange: Exchange, flat: torch.Tensor, reduction: Reduction, *, root: int) -> Steps:
    """Reduce flat memory in place; it holds the result at `root` and is scratch elsewhere.

    Each other vendor reduces to the root's partner, which sends to the root.
    """
    layout, moves = exchange.layout, Moves(exchange)
    here = layout.vendor_of(root)
    head = root if here == layout.vendor else layout.partner(root, layout.vendor)
    if exchange.library is not None:
        exchange.library.reduce(flat, reduction.op, root=layout.mine.index(head)).wait()
    if layout.rank != head:
        return
    if layout.rank != root:
        moves.send(root, flat)
        yield moves
        return
    partials = {layout.vendor: flat}
    for vendor in layout.others:
        partials[vendor] = torch.empty_like(flat)
        moves.recv(layout.partner(root, vendor), partials[vendor])
    yield moves
    combine_in_order(reduction, partials, out=flat)
