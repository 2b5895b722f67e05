"""Collectives with a row for each rank: all-gather, reduce-scatter, all-to-all, gather, scatter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero.collectives.all_reduce import combine_in_order
from hetero.collectives.exchange import Exchange, wait_all
from hetero.collectives.group_links import Transfer
from hetero.collectives.inside_vendor import Inside
from hetero.collectives.reductions import Reduction
from hetero.collectives.vendor_layout import Span, equal_parts, overlaps


def _rows_of(count: int, length: int) -> list[Span]:
    return [Span(row * length, (row + 1) * length) for row in range(count)]


def _block(table: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor | None:
    """The rows of a vendor as one flat piece of the table, where they lie together in it."""
    if ranks[-1] - ranks[0] != len(ranks) - 1:
        return None
    return table[ranks[0] : ranks[-1] + 1].reshape(-1)


def all_gather(exchange: Exchange, table: torch.Tensor, row: torch.Tensor) -> None:
    """Bring every rank's row into every rank's contiguous table [ranks, length].

    A row crosses once, cut for the ranks of the other vendor, which then gather the pieces.
    """
    layout, library, length = exchange.layout, exchange.library, row.numel()
    if not length:
        return
    sent: list[Transfer] = []
    mine = _rows_of(len(layout.mine), length)[layout.place]
    for vendor in layout.others:
        ranks = layout.vendors[vendor]
        for place, common in overlaps(mine, equal_parts(len(layout.mine) * length, len(ranks))):
            sent += exchange.send(ranks[place], row[common.within(mine)])
    if library is None:
        received: list[Transfer] = []
        for vendor in layout.others:
            for rank in layout.vendors[vendor]:
                received += exchange.recv(rank, table[rank])
        table[layout.rank].copy_(row)
        wait_all(received)
    else:
        blocks = [_Block(exchange, table, vendor, length) for vendor in layout.others]
        own = _block(table, layout.mine)
        gathered = row.new_empty(len(layout.mine) * length) if own is None else own
        inside = library.all_gather(gathered, row)
        for block in blocks:
            block.gather()
        inside.wait()
        if own is None:
            table[list(layout.mine)] = gathered.view(len(layout.mine), length)
        for block in blocks:
            block.finish()
    wait_all(sent)


class _Block:
    """The rows of another vendor: each rank receives a piece of them, and its vendor gathers it."""

    def __init__(self, exchange: Exchange, table: torch.Tensor, vendor: int, length: int) -> None:
        layout = exchange.layout
        self._exchange, self._table = exchange, table
        self._ranks, self._length = layout.vendors[vendor], length
        spans = equal_parts(len(self._ranks) * length, len(layout.mine))
        span = spans[layout.place]
        # The library's pieces are of one length; of the last one, less may come.
        self._piece = table.new_empty(len(spans[0]))
        whole = len(layout.mine) * len(spans[0])
        block = _block(table, self._ranks)
        self._in_place = block is not None and block.numel() == whole
        self._gathered = block if block is not None and self._in_place else table.new_empty(whole)
        self._inside: Inside | None = None
        self._received: list[Transfer] = []
        for place, common in overlaps(span, _rows_of(len(self._ranks), length)):
            self._received += exchange.recv(self._ranks[place], self._piece[common.within(span)])

    def gather(self) -> None:
        wait_all(self._received)
        if (library := self._exchange.library) is not None:
            self._inside = library.all_gather(self._gathered, self._piece)

    def finish(self) -> None:
        if self._inside is not None:
            self._inside.wait()
        if not self._in_place:
            rows = self._gathered[: len(self._ranks) * self._length]
            self._table[list(self._ranks)] = rows.view(len(self._ranks), self._length)


def reduce_scatter(
    exchange: Exchange, result: torch.Tensor, table: torch.Tensor, reduction: Reduction
) -> None:
    """Reduce every rank's table [ranks, length] and leave row r at rank r.

    What is for another vendor is reduced in pieces over all ranks of this one; each sends its own.
    """
    layout, length, library = exchange.layout, result.numel(), exchange.library
    if not length:
        return
    inside = []
    own = table[layout.rank]
    if library is not None:
        own = result.new_empty(length)
        inside.append(library.reduce_scatter(own, _rows(table, layout.mine), reduction.op))
    outgoing: dict[int, tuple[Span, torch.Tensor]] = {}
    for vendor in layout.others:
        block = _rows(table, layout.vendors[vendor])
        spans = equal_parts(block.numel(), len(layout.mine))
        piece = block
        if library is not None:
            missing = len(spans[0]) * len(layout.mine) - block.numel()
            whole = torch.nn.functional.pad(block, (0, missing)) if missing else block
            piece = block.new_empty(len(spans[0]))
            inside.append(library.reduce_scatter(piece, whole, reduction.op))
        outgoing[vendor] = spans[layout.place], piece
    for work in inside:
        work.wait()
    _exchange_pieces(exchange, result, own, outgoing, reduction)


def _rows(table: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor:
    """The rows of a vendor, flat: the table's own memory where they lie together."""
    block = _block(table, ranks)
    return table[list(ranks)].reshape(-1) if block is None else block


def _exchange_pieces(
    exchange: Exchange,
    result: torch.Tensor,
    own: torch.Tensor,
    outgoing: dict[int, tuple[Span, torch.Tensor]],
    reduction: Reduction,
) -> None:
    """Send each other vendor's ranks what is theirs of a piece, and add up what comes."""
    layout, length = exchange.layout, result.numel()
    sent: list[Transfer] = []
    received: list[Transfer] = []
    for vendor, (span, piece) in outgoing.items():
        ranks = layout.vendors[vendor]
        for place, common in overlaps(span, _rows_of(len(ranks), length)):
            sent += exchange.send(ranks[place], piece[common.within(span)])
    partials = {layout.vendor: own}
    mine = _rows_of(len(layout.mine), length)[layout.place]
    for vendor in layout.others:
        ranks = layout.vendors[vendor]
        partials[vendor] = torch.empty_like(own)
        parts = equal_parts(len(layout.mine) * length, len(ranks))
        for place, common in overlaps(mine, parts):
            received += exchange.recv(ranks[place], partials[vendor][common.within(mine)])
    wait_all(received)
    combine_in_order(reduction, partials, out=result)
    wait_all(sent)


def all_to_all(
    exchange: Exchange, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> None:
    """Send inputs[r] to rank r and receive outputs[r] from it; flat, of any sizes."""
    layout = exchange.layout
    foreign = [rank for vendor in layout.others for rank in layout.vendors[vendor]]
    sent: list[Transfer] = []
    received: list[Transfer] = []
    for rank in sorted(foreign):
        sent += exchange.send(rank, inputs[rank])
    inside = None
    if exchange.library is not None:
        arrived = torch.cat([outputs[rank] for rank in layout.mine])
        leaving = torch.cat([inputs[rank] for rank in layout.mine])
        output_splits = [outputs[rank].numel() for rank in layout.mine]
        inside = exchange.library.all_to_all(
            arrived,
            leaving,
            output_splits=output_splits,
            input_splits=[inputs[rank].numel() for rank in layout.mine],
        )
    else:
        outputs[layout.rank].copy_(inputs[layout.rank])
    for rank in sorted(foreign):
        received += exchange.recv(rank, outputs[rank])
    if inside is not None:
        inside.wait()
        for rank, part in zip(layout.mine, arrived.split(output_splits), strict=True):
            outputs[rank].copy_(part)
    wait_all(received)
    wait_all(sent)


def gather(
    exchange: Exchange, outputs: Sequence[torch.Tensor], source: torch.Tensor, *, root: int
) -> None:
    """Bring every rank's flat memory, all of one size, to the root's outputs."""
    layout = exchange.layout
    if layout.vendor_of(root) != layout.vendor:
        wait_all(exchange.send(root, source))
        return
    if exchange.library is not None:
        inside = [outputs[rank] for rank in layout.mine] if layout.rank == root else []
        exchange.library.gather(inside, source, root=layout.mine.index(root)).wait()
    else:
        outputs[root].copy_(source)
    if layout.rank == root:
        received: list[Transfer] = []
        for vendor in layout.others:
            for rank in layout.vendors[vendor]:
                received += exchange.recv(rank, outputs[rank])
        wait_all(received)


def scatter(
    exchange: Exchange, target: torch.Tensor, inputs: Sequence[torch.Tensor], *, root: int
) -> None:
    """Bring the root's inputs, all of one size, one to each rank's flat memory."""
    layout = exchange.layout
    if layout.vendor_of(root) != layout.vendor:
        wait_all(exchange.recv(root, target))
        return
    sent: list[Transfer] = []
    if layout.rank == root:
        for vendor in layout.others:
            for rank in layout.vendors[vendor]:
                sent += exchange.send(rank, inputs[rank])
    if exchange.library is not None:
        inside = [inputs[rank] for rank in layout.mine] if layout.rank == root else []
        exchange.library.scatter(target, inside, root=layout.mine.index(root)).wait()
    else:
        target.copy_(inputs[root])
    wait_all(sent)
