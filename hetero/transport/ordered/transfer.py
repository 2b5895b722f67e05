"""What an ordered link keeps of its ends, its directions and the transfers under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hetero.device.base import Mark
from hetero.device.ordered import OrderedStream
from hetero.errors import LinkError
from hetero.transport.base import Work
from hetero.transport.ordered.ring import Direction, EndState


class EnqueuingLink(Protocol):
    """What a transfer asks of its link."""

    def progress_until_enqueued(self, transfer: OrderedTransfer) -> None:
        """Return once all of the transfer is in a stream, or it has failed."""


@dataclass(frozen=True)
class OrderedEnds:
    """What both ends of a stream-ordered link have mapped, and how to let go of it."""

    outgoing: Direction
    incoming: Direction
    mine: EndState
    theirs: EndState
    outgoing_ring: int
    incoming_ring: int
    """Addresses of the data, as this end's device knows them."""
    ring_bytes: int
    """Of one direction."""
    peer_has_gone: Callable[[], bool]
    close: Callable[[], None]


@dataclass(eq=False, slots=True)
class OrderedTransfer(Work):
    """A tensor on its way through a stream of its link."""

    link: EnqueuingLink
    tensor: torch.Tensor
    ready: Mark
    is_receive: bool
    deadline: float
    sequence: int
    header: bytes
    nbytes: int
    address: int
    offset: int = 0
    begun: bool = False
    landed: Mark | None = None
    """Set once all of it has been enqueued."""
    error: LinkError | None = None

    def done(self) -> bool:
        if self.error is not None:
            return True
        return self.landed is not None and self.landed.reached()

    def wait(self) -> None:
        """Order the current stream after the transfer.

        Blocks the calling thread only until the peer's side has been enqueued as well.
        """
        if self.landed is None and self.error is None:
            self.link.progress_until_enqueued(self)
        if self.error is not None:
            raise self.error
        assert self.landed is not None
        self.landed.order_current_stream()
        # A device that is the CPU has waited; it must not be given what a failure released.
        if self.error is not None:
            raise self.error


@dataclass
class Flow:
    """One direction of one end: what is to be enqueued, and what is on its way."""

    stream: OrderedStream
    waiting: deque[OrderedTransfer] = field(default_factory=deque)
    under_way: deque[OrderedTransfer] = field(default_factory=deque)
    count: int = 0
    """Entries enqueued."""
    sequence: int = 0
    awaited: int = 0
    """The largest counter value that the stream was made to wait for."""

    def transfers(self) -> list[OrderedTransfer]:
        return [*self.under_way, *self.waiting]
