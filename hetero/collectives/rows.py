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
from hetero.collectives.flat_memory import Piece, bytes_in, copy, is_same, joined, whole
from hetero.collectives.group_links import as_bytes
from hetero.collectives.inside_vendor import Inside
from hetero.collectives.reductions import Reduction
from hetero.collectives.vendor_layout import Span, chunks, equal_parts, overlaps
from hetero.errors import LinkError
from hetero.words import counted

_COPIED_FIRST = {True: DIRECT_BYTES, False: 32 << 20}
"""Up to here a rank's own row is copied before messages are asked for, which then takes one call.

By whether it is on a CPU. A GPU copies this in 25 us, and to ask for messages beside it costs
Python more.
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
    rows: Sequence[Piece],
    row: torch.Tensor,
    *,
    table: torch.Tensor | None = None,
) -> Steps:
    """Bring every rank's row into every rank's rows, all of one size.

    A row crosses once, cut for the ranks of the other vendor, which then gather the pieces.

    Args:
        table: contiguous memory that `rows` make up in their order, where they do.
    """
    if not row.numel():
        return iter(())
    if exchange.library is None:
        return _all_gather_alone(exchange, rows, row)
    row = as_bytes(row)
    if table is None:
        return _all_gather_in_rows(exchange, rows, row)
    return _all_gather_in_table(exchange, as_bytes(table).view(len(rows), -1), row)


def _all_gather_alone(exchange: Exchange, rows: Sequence[Piece], row: torch.Tensor) -> Steps:
    """Where this rank is its vendor's only one, each other rank's row comes from that rank."""
    layout, moves = exchange.layout, Moves(exchange)
    for vendor in layout.others:
        for rank, first, size in _pieces(row.nbytes, layout.vendors[vendor]):
            moves.send(rank, row, first, size)
    for rank in layout.foreign:
        moves.recv(rank, *rows[rank])
    _copy_beside(moves, rows[layout.rank], whole(row))
    yield moves


def _pieces(size: int, ranks: Sequence[int], *, unit: int = 1) -> list[tuple[int, int, int]]:
    """What of a row of so many bytes each of another vendor's ranks sees to: first byte, size."""
    if len(ranks) == 1:
        return [(ranks[0], 0, size)]
    spans = equal_parts(size // unit, len(ranks))
    return [(rank, s.begin * unit, len(s) * unit) for rank, s in zip(ranks, spans, strict=True)]


def _all_gather_in_rows(exchange: Exchange, rows: Sequence[Piece], row: torch.Tensor) -> Steps:
    table = row.new_empty(len(rows), row.numel())
    yield from _all_gather_in_table(exchange, table, row)
    for target, gathered in zip(rows, table, strict=True):
        bytes_in(target).copy_(gathered)


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
    exchange: Exchange, result: torch.Tensor, flat: torch.Tensor, reduction: Reduction
) -> Steps:
    """Reduce every rank's flat memory of a row for each rank, and leave row r at rank r.

    What is for another vendor is reduced in pieces over all ranks of this one; each sends its own.
    """
    length = result.numel()
    if not length:
        return iter(())
    # Where this rank is its vendor's only one, its rows are its vendor's partial results.
    if exchange.library is None and length <= chunk_length(exchange, result):
        return _reduce_scatter_at_once(exchange, result, flat, reduction)
    return _reduce_scatter_in_chunks(exchange, result, flat.view(-1, length), reduction)


def _reduce_scatter_in_chunks(
    exchange: Exchange, result: torch.Tensor, table: torch.Tensor, reduction: Reduction
) -> Steps:
    layout, length, library = exchange.layout, result.numel(), exchange.library
    if library is None:
        pieces = [_Piece(rank, Span(0, length), table[rank]) for rank in layout.foreign]
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
        inside.append(library.reduce_scatter(reduced, padded, reduction))
        span = spans[layout.place]
        for place, common in overlaps(span, _rows_of(len(ranks), length)):
            row = common.moved(-place * length)
            pieces.append(_Piece(ranks[place], row, reduced[common.within(span)]))
    own = result.new_empty(length)
    last = library.reduce_scatter(own, _rows(table, layout.mine), reduction)
    for work in inside:
        work.wait()
    yield from _exchange_pieces(exchange, result, own, pieces, reduction, under_way=last)


def _reduce_scatter_at_once(
    exchange: Exchange, result: torch.Tensor, flat: torch.Tensor, reduction: Reduction
) -> Steps:
    """In one step, for whose few messages Python is asked once."""
    layout, moves = exchange.layout, Moves(exchange)
    length, size = result.numel(), result.nbytes
    partials = {layout.vendor: flat[layout.rank * length : (layout.rank + 1) * length]}
    for rank in layout.foreign:
        moves.send(rank, flat, rank * size, size)
    # What comes of the first vendor lies where the result will, unless rows are sent from there.
    is_in_place = -size < result.data_ptr() - flat.data_ptr() < flat.nbytes
    room = None if is_in_place else result
    for vendor in layout.others:
        partial, room = torch.empty_like(result) if room is None else room, None
        partials[vendor] = partial
        for rank, first, part in _pieces(size, layout.vendors[vendor], unit=size // length):
            moves.recv(rank, partial, first, part)
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


def all_to_all(exchange: Exchange, outputs: Sequence[Piece], inputs: Sequence[Piece]) -> Steps:
    """Send inputs[r] to rank r and receive outputs[r] from it; of any sizes."""
    layout, moves = exchange.layout, Moves(exchange)
    for rank in layout.foreign:
        moves.send(rank, *inputs[rank])
        moves.recv(rank, *outputs[rank])
    if exchange.library is None:
        _copy_beside(moves, outputs[layout.rank], inputs[layout.rank])
        yield moves
        return
    moves.begin()
    taken, given = ([pieces[rank] for rank in layout.mine] for pieces in (outputs, inputs))
    output_splits, input_splits = ([size for _, _, size in pieces] for pieces in (taken, given))
    leaving, room = joined(given), joined(taken)
    if leaving is None:
        leaving = torch.cat([bytes_in(piece) for piece in given])
    arrived = leaving.new_empty(sum(output_splits)) if room is None else room
    if arrived.is_cpu:
        _require_same_sizes(exchange, taken=output_splits, given=input_splits)
    exchange.library.all_to_all(
        arrived, leaving, output_splits=output_splits, input_splits=input_splits
    ).wait()
    if room is None:
        for piece, part in zip(taken, arrived.split(output_splits), strict=True):
            bytes_in(piece).copy_(part)
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


def _copy_beside(moves: Moves, target: Piece, source: Piece) -> None:
    """Copy what this rank has for itself: while large messages are on their way, before small."""
    if not is_same(target, source):
        if source[2] > _COPIED_FIRST[source[0].is_cpu]:
            moves.begin()
        copy(target, source)


def gather(
    exchange: Exchange, outputs: Sequence[torch.Tensor], source: torch.Tensor, *, root: int
) -> Steps:
    """Bring every rank's memory, all of one size, to the root's outputs."""
    layout, moves = exchange.layout, Moves(exchange)
    if layout.vendor_of(root) != layout.vendor:
        moves.send(root, source)
        yield moves
        return
    if exchange.library is not None:
        inside = [as_bytes(outputs[rank]) for rank in layout.mine] if layout.rank == root else []
        exchange.library.gather(inside, as_bytes(source), root=layout.mine.index(root)).wait()
    else:
        copy(whole(outputs[root]), whole(source))
    if layout.rank == root:
        for rank in layout.foreign:
            moves.recv(rank, outputs[rank])
        yield moves


def scatter(
    exchange: Exchange, target: torch.Tensor, inputs: Sequence[torch.Tensor], *, root: int
) -> Steps:
    """Bring the root's inputs, all of one size, one to each rank's memory."""
    layout, moves = exchange.layout, Moves(exchange)
    if layout.vendor_of(root) != layout.vendor:
        moves.recv(root, target)
        yield moves
        return
    if layout.rank == root:
        for rank in layout.foreign:
            moves.send(rank, inputs[rank])
    if exchange.library is not None:
        moves.begin()
        inside = [as_bytes(inputs[rank]) for rank in layout.mine] if layout.rank == root else []
        exchange.library.scatter(as_bytes(target), inside, root=layout.mine.index(root)).wait()
    else:
        copy(whole(target), whole(inputs[root]))
    yield moves
