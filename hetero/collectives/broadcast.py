"""One rank's memory to all: whole if it is small, in shards over every rank if it is large."""

from __future__ import annotations

import torch

from hetero.collectives.all_reduce import DIRECT_BYTES
from hetero.collectives.exchange import Exchange, Moves, Steps
from hetero.collectives.group_links import as_bytes
from hetero.collectives.vendor_layout import equal_parts, overlaps


def broadcast(exchange: Exchange, memory: torch.Tensor, *, root: int) -> Steps:
    """Bring the root's contiguous memory into every rank's."""
    if not memory.numel():
        return iter(())
    if memory.nbytes <= DIRECT_BYTES:
        return _whole(exchange, memory, root=root)
    return _in_shards(exchange, as_bytes(memory), root=root)


def _whole(exchange: Exchange, memory: torch.Tensor, *, root: int) -> Steps:
    layout, moves = exchange.layout, Moves(exchange)
    head = root
    if layout.vendor_of(root) != layout.vendor:
        head = layout.partner(root, layout.vendor)
        if layout.rank == head:
            moves.recv(root, memory)
            yield moves
    elif layout.rank == root:
        for vendor in layout.others:
            moves.send(layout.partner(root, vendor), memory)
        if exchange.library is not None:
            moves.begin()
    if exchange.library is not None:
        exchange.library.broadcast(as_bytes(memory), root=layout.mine.index(head)).wait()
    yield moves


def _in_shards(exchange: Exchange, flat: torch.Tensor, *, root: int) -> Steps:
    """Scatter inside the root's vendor, send shards to the others, all-gather in each."""
    layout, library = exchange.layout, exchange.library
    missing = -flat.numel() % layout.grain
    whole = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
    spans = [equal_parts(whole.numel(), len(ranks)) for ranks in layout.vendors]
    span = spans[layout.vendor][layout.place]
    source = layout.vendor_of(root)
    shard = whole if library is None else whole.new_empty(len(span))
    moves = Moves(exchange)
    if layout.vendor == source:
        if library is not None:
            parts = list(whole.split(len(span))) if layout.rank == root else []
            library.scatter(shard, parts, root=layout.mine.index(root)).wait()
        for vendor in layout.others:
            for place, common in overlaps(span, spans[vendor]):
                piece = shard[common.within(span)]
                moves.send(layout.vendors[vendor][place], piece)
        if library is not None:
            moves.begin()
    else:
        for place, common in overlaps(span, spans[source]):
            piece = shard[common.within(span)]
            moves.recv(layout.vendors[source][place], piece)
        yield moves
    if library is not None:
        library.all_gather(whole, shard).wait()
    yield moves
    if whole is not flat:
        flat.copy_(whole[: flat.numel()])
