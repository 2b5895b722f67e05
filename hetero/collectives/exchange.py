"""Messages of one call between ranks of a group, each with the call's tag.

A peer that has called something else is told so by its link, instead of taking the bytes for its
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hetero.collectives.calls import Call
from hetero.collectives.group_links import Links, Message, RingExchange, Transfer
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
        self.links, self.tag = links, 0
        self.may_block = True
        """Whether the calling thread may wait for a peer."""
        self.ring = RingExchange()

    def begin(self, call: Call) -> None:
        """The messages from here on are this call's."""
        self.tag = call.tag

    def compare_inside(self) -> Moves:
        """Compare this call with those of the vendor's own ranks; gloo compares nothing.

        Its wait raises LinkError before anything that differs is given to the library.
        """
        moves, nothing = Moves(self), torch.empty(0, dtype=torch.uint8, device=self.device)
        for is_receive in (False, True):
            moves.wanted += [(rank, nothing, is_receive) for rank in self.layout.team]
        return moves


class Moves:
    """Messages that go together. What is sent must not change before they have been waited for."""

    __slots__ = ("_exchange", "_under_way", "wanted")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.wanted: list[tuple[int, torch.Tensor, bool]] = []
        self._under_way: Sequence[Transfer] | None = None

    def send(self, rank: int, tensor: torch.Tensor) -> None:
        """Send contiguous memory; nothing where there is none."""
        if tensor.numel():
            self.wanted.append((rank, tensor, False))

    def recv(self, rank: int, tensor: torch.Tensor) -> None:
        """Receive into contiguous memory."""
        if tensor.numel():
            self.wanted.append((rank, tensor, True))

    def begin(self) -> None:
        """Have them go on their way beside what comes before the wait."""
        if not self._needs_peers():
            tag = self._exchange.tag
            self._under_way = [
                link.recv(tensor, tag=tag) if is_receive else link.send(tensor, tag=tag)
                for link, tensor, is_receive in self._messages()
            ]

    def _needs_peers(self) -> bool:
        """Whether a link has to be opened, for which the caller may not wait."""
        exchange = self._exchange
        if exchange.may_block:
            return False
        return not all(exchange.links.is_open_to(rank) for rank, _, _ in self.wanted)

    def _messages(self) -> list[Message]:
        link_to = self._exchange.links.to
        return [Message(link_to(rank), tensor, way) for rank, tensor, way in self.wanted]

    def wait(self) -> None:
        """Order the current stream behind them; on a CPU, block until they are done."""
        if not self.are_ordered(_SPIN_MICROSECONDS):
            for transfer in self._under_way or ():
                transfer.wait()
            self._under_way = ()

    def are_ordered(self, microseconds: int = _TRY_MICROSECONDS) -> bool:
        """Whether nothing is to be waited for any more, having looked for so long."""
        if self._under_way is None:
            if self._needs_peers():
                return False
            self._under_way = ()
            if self.wanted:
                self._under_way = self._exchange.ring.order(
                    self._messages(), tag=self._exchange.tag, microseconds=microseconds
                )
        return not self._under_way


Steps = Iterator[Moves]
"""What carries a call out: it goes on when the current stream is behind what was yielded.

So whoever carries it out may wait there, or leave the rest to another thread.
"""
