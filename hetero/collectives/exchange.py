"""Messages of one call between ranks of a group, each with the call's tag.

A peer that has called something else is told so by its link, instead of taking the bytes for its
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hetero.collectives.calls import Call
from hetero.collectives.group_links import LinkTo, Message, RingExchange, Transfer
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
        link_to: LinkTo,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.library = library
        """None where this rank is its vendor's only one."""
        self.device = device
        self.link_to, self.tag = link_to, 0
        self.ring = RingExchange()

    def begin(self, call: Call) -> None:
        """The messages from here on are this call's."""
        self.tag = call.tag

    def compare_inside(self) -> Moves:
        """Compare this call with those of the vendor's own ranks; gloo compares nothing.

        Its wait raises LinkError before anything that differs is given to the library.
        """
        moves, nothing = Moves(self), torch.empty(0, dtype=torch.uint8, device=self.device)
        for rank in self.layout.team:
            moves.add(rank, nothing, is_receive=False)
        for rank in self.layout.team:
            moves.add(rank, nothing, is_receive=True)
        return moves


class Moves:
    """Messages that go together. What is sent must not change before they have been waited for."""

    __slots__ = ("_exchange", "_messages", "_under_way")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._messages: list[Message] = []
        self._under_way: Sequence[Transfer] | None = None

    def send(self, rank: int, tensor: torch.Tensor) -> None:
        """Send contiguous memory; nothing where there is none."""
        if tensor.numel():
            self.add(rank, tensor, is_receive=False)

    def recv(self, rank: int, tensor: torch.Tensor) -> None:
        """Receive into contiguous memory."""
        if tensor.numel():
            self.add(rank, tensor, is_receive=True)

    def add(self, rank: int, tensor: torch.Tensor, *, is_receive: bool) -> None:
        self._messages.append(Message(self._exchange.link_to(rank), tensor, is_receive))

    def begin(self) -> None:
        """Have them go on their way beside what comes before the wait."""
        tag = self._exchange.tag
        self._under_way = [
            link.recv(tensor, tag=tag) if is_receive else link.send(tensor, tag=tag)
            for link, tensor, is_receive in self._messages
        ]

    def wait(self) -> None:
        """Order the current stream behind them; on a CPU, block until they are done."""
        if not self.are_ordered(_SPIN_MICROSECONDS):
            for transfer in self._under_way or ():
                transfer.wait()
            self._under_way = ()

    def are_ordered(self, microseconds: int = _TRY_MICROSECONDS) -> bool:
        """Whether nothing is to be waited for any more, having looked for so long."""
        if self._under_way is None and self._messages:
            self._under_way = self._exchange.ring.order(
                self._messages, tag=self._exchange.tag, microseconds=microseconds
            )
        return not self._under_way


Steps = Iterator[Moves]
"""What carries a call out: it goes on when the current stream is behind what was yielded.

So whoever carries it out may wait there, or leave the rest to another thread.
"""
