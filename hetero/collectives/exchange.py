"""Messages of one call between ranks of a group, each with the call's tag.

A peer that has called something else is told so by its link, instead of taking the bytes for its
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hetero.collectives.group_links import Links, Message, RingExchange, Transfer, begin
from hetero.collectives.inside_vendor import VendorLibrary
from hetero.collectives.vendor_layout import Layout

_SPIN_MICROSECONDS = 500
_TRY_MICROSECONDS = 50
"""Less than it costs to have another thread go on."""


class Exchange:
    """What the calls of a group use, one call at a time. Peers are ranks of the group."""

    def __init__(
        self,
        *,
        layout: Layout,
        library: VendorLibrary | None,
        links: Links,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.library = library
        """None where this rank is its vendor's only one."""
        self.device = device
        self.links = links
        self.tag = 0
        """Of the call under way."""
        self.may_block = True
        """Whether the calling thread may wait for a peer."""
        self.ring = RingExchange()

    def compare_inside(self) -> Moves:
        """Compare this call with those of the vendor's own ranks; gloo compares nothing.

        Its wait raises LinkError before anything that differs is given to the library.
        """
        moves, nothing = Moves(self), torch.empty(0, dtype=torch.uint8, device=self.device)
        for is_receive in (False, True):
            moves.wanted += [(rank, nothing, 0, 0, is_receive) for rank in self.layout.team]
        return moves


class Moves:
    """Messages that go together. What is sent must not change before they have been waited for."""

    __slots__ = ("_exchange", "_under_way", "wanted")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.wanted: list[tuple[int, torch.Tensor, int, int, bool]] = []
        self._under_way: Sequence[Transfer] | None = None

    def send(self, rank: int, memory: torch.Tensor, first: int = 0, size: int = -1) -> None:
        """Send contiguous memory, or so many of its bytes from one on; nothing where it is none."""
        if size < 0:
            size = memory.nbytes
        if size:
            self.wanted.append((rank, memory, first, size, False))

    def recv(self, rank: int, memory: torch.Tensor, first: int = 0, size: int = -1) -> None:
        """Receive into contiguous memory."""
        if size < 0:
            size = memory.nbytes
        if size:
            self.wanted.append((rank, memory, first, size, True))

    def begin(self) -> None:
        """Have them go on their way beside what comes before the wait."""
        if (messages := self._messages()) is not None:
            self._under_way = [begin(message, tag=self._exchange.tag) for message in messages]

    def _messages(self) -> list[Message] | None:
        """None where a link has to be opened first, for which the caller may not wait."""
        links = self._exchange.links
        if not self._exchange.may_block and not all(links.is_open_to(to[0]) for to in self.wanted):
            return None
        return [
            (links.to(rank), memory, first, size, is_receive)
            for rank, memory, first, size, is_receive in self.wanted
        ]

    def wait(self) -> None:
        """Order the current stream behind them; on a CPU, block until they are done."""
        if not self.are_ordered(_SPIN_MICROSECONDS):
            for transfer in self._under_way or ():
                transfer.wait()
            self._under_way = ()

    def are_ordered(self, microseconds: int = _TRY_MICROSECONDS) -> bool:
        """Whether nothing is to be waited for any more, having looked for so long."""
        if self._under_way is None:
            if (messages := self._messages()) is None:
                return False
            self._under_way = ()
            if messages:
                self._under_way = self._exchange.ring.order(
                    messages, tag=self._exchange.tag, microseconds=microseconds
                )
        return not self._under_way


Steps = Iterator[Moves]
"""What carries a call out: it goes on when the current stream is behind what was yielded.

So whoever carries it out may wait there, or leave the rest to another thread.
"""
