"""Collectives with a row for each rank: all-gather, reduce-scatter, all-to-all, gather, scatter."""

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
from hetero.collectives.exchange import Exchange, Moves, Steps
from hetero.collectives.inside_vendor import Inside
from hetero.collectives.reductions import Reduction
from hetero.collectives.vendor_layout import Span, chunks, equal_parts, overlaps
from hetero.errors import LinkError
from hetero.words import counted

_COPIED_FIRST = {"cpu": DIRECT_BYTES, "cuda": 32 << 20}
"""Up to here a rank's own row is copied before messages are asked for, which then takes one call.

A GPU copies this in 25 us, and to ask for messages beside it costs Python more.
"""


def _rows_of(count: int, length: int) -> list[Span]:
    return [Span(row * length, (row + 1) * length) for row in range(count)]


def _block(table: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor | None:
    """The rows of a vendor as one flat piece of the table, where they lie together in it."""
    if ranks[-1] - ranks[0] != len(ranks) - 1:
        return None
    return table[ranks[0] : ranks[-1] + 1].reshape(-1)


def all_gather(
    exchange: Exchange,
    rows: Sequence[torch.Tensor],
    row: torch.Tensor,
    *,
    table: torch.Tensor | None = None,
) -> Steps:
    """Bring every rank's row into every rank's rows, all flat and of one length.

    A row crosses once, cut for the ranks of the other vendor, which then gather the pieces.

    Args:
        table: contiguous memory [ranks, length] of which `rows` are the rows, where they are.
    """
    if not row.numel():
        return
    if exchange.library is None:
        yield from _all_gather_alone(exchange, rows, row)
        return
    if table is None:
        table = row.new_empty(len(rows), row.numel())
        yield from _all_gather_in_table(exchange, table, row)
        for target, gathered in zip(rows, table, strict=True):
            target.copy_(gathered)
    else:
        yield from _all_gather_in_table(exchange, table, row)


def _all_gather_alone(exchange: Exchange, rows: Sequence[torch.Tensor], row: torch.Tensor) -> Steps:
    """Where this rank is its vendor's only one, each other rank's row comes from that rank."""
    layout, moves = exchange.layout, Moves(exchange)
    for vendor in layout.others:
        for rank, piece in _pieces(row, layout.vendors[vendor]):
            moves.send(rank, piece)
    for vendor in layout.others:
        for rank in layout.vendors[vendor]:
            moves.recv(rank, rows[rank])
    yield from _beside_copy(moves, rows[layout.rank], row)


def _pieces(row: torch.Tensor, ranks: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
    """What of a row each of another vendor's ranks sees to."""
    if len(ranks) == 1:
        return [(ranks[0], row)]
    spans = equal_parts(row.numel(), len(ranks))
    return [(rank, row[span.begin : span.end]) for rank, span in zip(ranks, spans, strict=True)]


def _all_gather_in_table(exchange: Exchange, table: torch.Tensor, row: torch.Tensor) -> Steps:
    layout, library, length = exchange.layout, exchange.library, row.numel()
    assert library is not None
    sent = Moves(exchange)
    mine = _rows_of(len(layout.mine), length)[layout.place]
    for vendor in layout.others:
        ranks = layout.vendors[vendor]
        for place, common in overlaps(mine, equal_parts(len(layout.mine) * length, len(ranks))):
            sent.send(ranks[place], row[common.within(mine)])
    sent.begin()
    blocks = [_Block(exchange, table, vendor, length) for vendor in layout.others]
    own = _block(table, layout.mine)
    gathered = row.new_empty(len(layout.mine) * length) if own is None else own
    inside = library.all_gather(gathered, row)
    for block in blocks:
        yield from block.gather()
    inside.wait()
    if own is None:
        table[list(layout.mine)] = gathered.view(len(layout.mine), length)
    for block in blocks:
        block.finish()
    yield sent


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
        self._received = Moves(exchange)
        for place, common in overlaps(span, _rows_of(len(self._ranks), length)):
            self._received.recv(self._ranks[place], self._piece[common.within(span)])
        self._received.begin()

    def gather(self) -> Steps:
        yield self._received
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
) -> Steps:
    """Reduce every rank's table [ranks, length] and leave row r at rank r.

    What is for another vendor is reduced in pieces over all ranks of this one; each sends its own.
    """
    layout, length, library = exchange.layout, result.numel(), exchange.library
    if not length:
        return
    # Where this rank is its vendor's only one, its rows are its vendor's partial results.
    if library is None and length <= chunk_length(exchange, result):
        yield from _reduce_scatter_at_once(exchange, result, table, reduction)
        return
    if library is None:
        whole = Span(0, length)
        foreign = [rank for vendor in layout.others for rank in layout.vendors[vendor]]
        pieces = [_Piece(rank, whole, table[rank]) for rank in foreign]
        yield from _exchange_pieces(exchange, result, table[layout.rank], pieces, reduction)
        return
    pieces, inside = [], []
    for vendor in layout.others:
        ranks = layout.vendors[vendor]
        block = _rows(table, ranks)
        spans = equal_parts(block.numel(), len(layout.mine))
        missing = len(spans[0]) * len(layout.mine) - block.numel()
        padded = torch.nn.functional.pad(block, (0, missing)) if missing else block
        reduced = block.new_empty(len(spans[0]))
        inside.append(library.reduce_scatter(reduced, padded, reduction.op))
        span = spans[layout.place]
        for place, common in overlaps(span, _rows_of(len(ranks), length)):
            row = common.moved(-place * length)
            pieces.append(_Piece(ranks[place], row, reduced[common.within(span)]))
    own = result.new_empty(length)
    last = library.reduce_scatter(own, _rows(table, layout.mine), reduction.op)
    for work in inside:
        work.wait()
    yield from _exchange_pieces(exchange, result, own, pieces, reduction, under_way=last)


def _reduce_scatter_at_once(
    exchange: Exchange, result: torch.Tensor, table: torch.Tensor, reduction: Reduction
) -> Steps:
    """In one step, for whose few messages Python is asked once."""
    layout, moves = exchange.layout, Moves(exchange)
    own = table[layout.rank]
    partials = {layout.vendor: own}
    for vendor in layout.others:
        for rank in layout.vendors[vendor]:
            moves.send(rank, table[rank])
        partials[vendor] = torch.empty_like(own)
        for rank, piece in _pieces(partials[vendor], layout.vendors[vendor]):
            moves.recv(rank, piece)
    yield moves
    combine_in_order(reduction, partials, out=result)


@dataclass(frozen=True)
class _Piece:
    """What this rank holds of its vendor's partial result for another vendor's rank."""

    rank: int
    span: Span
    """Of that rank's row."""
    memory: torch.Tensor


def _rows(table: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor:
    """The rows of a vendor, flat: the table's own memory where they lie together."""
    block = _block(table, ranks)
    return table[list(ranks)].reshape(-1) if block is None else block


def _exchange_pieces(
    exchange: Exchange,
    result: torch.Tensor,
    own: torch.Tensor,
    pieces: Sequence[_Piece],
    reduction: Reduction,
    *,
    under_way: Inside | None = None,
) -> Steps:
    """Send each piece, and add to this vendor's partial result what comes of the others'.

    Chunk by chunk of the rows, so that one is added up while the next are on their way.

    Args:
        under_way: what `own` has to wait for.
    """
    layout = exchange.layout
    mine = _rows_of(len(layout.mine), len(own))[layout.place]
    givers = [
        (vendor, layout.vendors[vendor][place], common.moved(-mine.begin))
        for vendor in layout.others
        for place, common in overlaps(
            mine, equal_parts(len(layout.mine) * len(own), len(layout.vendors[vendor]))
        )
    ]
    spans = chunks(len(own), length=chunk_length(exchange, own), grain=1)
    ahead = CHUNKS_AHEAD[own.device.type]
    crossing: deque[tuple[Moves, dict[int, torch.Tensor]]] = deque()
    for step in range(len(spans) + ahead):
        if step < len(spans):
            span, moves = spans[step], Moves(exchange)
            for piece in pieces:
                moves.send(piece.rank, piece.memory[piece.span.meet(span).within(piece.span)])
            partials = {vendor: own.new_empty(len(span)) for vendor in layout.others}
            for vendor, rank, given in givers:
                moves.recv(rank, partials[vendor][given.meet(span).within(span)])
            if len(spans) > 1:
                moves.begin()
            crossing.append((moves, partials))
        if step == ahead and under_way is not None:
            under_way.wait()
        if step >= ahead:
            moves, partials = crossing.popleft()
            yield moves
            span = spans[step - ahead]
            partials[layout.vendor] = own[span.begin : span.end]
            combine_in_order(reduction, partials, out=result[span.begin : span.end])


def all_to_all(
    exchange: Exchange, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Steps:
    """Send inputs[r] to rank r and receive outputs[r] from it; flat, of any sizes."""
    layout = exchange.layout
    foreign = [rank for vendor in layout.others for rank in layout.vendors[vendor]]
    moves = Moves(exchange)
    for rank in sorted(foreign):
        moves.send(rank, inputs[rank])
    for rank in sorted(foreign):
        moves.recv(rank, outputs[rank])
    if exchange.library is None:
        yield from _beside_copy(moves, outputs[layout.rank], inputs[layout.rank])
        return
    moves.begin()
    arrived = torch.cat([outputs[rank] for rank in layout.mine])
    leaving = torch.cat([inputs[rank] for rank in layout.mine])
    output_splits = [outputs[rank].numel() for rank in layout.mine]
    input_splits = [inputs[rank].numel() for rank in layout.mine]
    if arrived.device.type == "cpu":
        _require_same_sizes(exchange, taken=output_splits, given=input_splits)
    exchange.library.all_to_all(
        arrived, leaving, output_splits=output_splits, input_splits=input_splits
    ).wait()
    for rank, part in zip(layout.mine, arrived.split(output_splits), strict=True):
        outputs[rank].copy_(part)
    yield moves


def _require_same_sizes(exchange: Exchange, *, taken: list[int], given: list[int]) -> None:
    """What ranks of this vendor give each other, in bytes. gloo ends a process that is given more.

    Raises LinkError, which names who gives something else than is taken.
    """
    layout, library, ones = exchange.layout, exchange.library, [1] * len(given)
    assert library is not None
    told = torch.empty(len(given), dtype=torch.int64, device="cpu")
    mine = torch.tensor(given, device="cpu")
    library.all_to_all(told, mine, output_splits=ones, input_splits=ones).wait()
    for rank, sent, wanted in zip(layout.mine, told.tolist(), taken, strict=True):
        if sent != wanted:
            raise LinkError(
                f"{layout.members[rank]} gives {counted(sent, 'byte')} to "
                f"{layout.members[layout.rank]}, which takes {wanted}; make both the same"
            )


def _beside_copy(moves: Moves, target: torch.Tensor, source: torch.Tensor) -> Steps:
    """Messages, and what this rank has for itself: at once with large ones, before small ones."""
    if target.data_ptr() != source.data_ptr():
        if source.nbytes > _COPIED_FIRST[source.device.type]:
            moves.begin()
        target.copy_(source)
    yield moves


def gather(
    exchange: Exchange, outputs: Sequence[torch.Tensor], source: torch.Tensor, *, root: int
) -> Steps:
    """Bring every rank's flat memory, all of one size, to the root's outputs."""
    layout, moves = exchange.layout, Moves(exchange)
    if layout.vendor_of(root) != layout.vendor:
        moves.send(root, source)
        yield moves
        return
    if exchange.library is not None:
        inside = [outputs[rank] for rank in layout.mine] if layout.rank == root else []
        exchange.library.gather(inside, source, root=layout.mine.index(root)).wait()
    else:
        outputs[root].copy_(source)
    if layout.rank == root:
        for vendor in layout.others:
            for rank in layout.vendors[vendor]:
                moves.recv(rank, outputs[rank])
        yield moves


def scatter(
    exchange: Exchange, target: torch.Tensor, inputs: Sequence[torch.Tensor], *, root: int
) -> Steps:
    """Bring the root's inputs, all of one size, one to each rank's flat memory."""
    layout, moves = exchange.layout, Moves(exchange)
    if layout.vendor_of(root) != layout.vendor:
        moves.recv(root, target)
        yield moves
        return
    if layout.rank == root:
        for vendor in layout.others:
            for rank in layout.vendors[vendor]:
                moves.send(rank, inputs[rank])
    if exchange.library is not None:
        moves.begin()
        inside = [inputs[rank] for rank in layout.mine] if layout.rank == root else []
        exchange.library.scatter(target, inside, root=layout.mine.index(root)).wait()
    else:
        target.copy_(inputs[root])
    yield moves
