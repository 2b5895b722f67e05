"""What an ordered link keeps of its ends and of the transfers under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from hetero.device.base import Mark
from hetero.device.ordered import OrderedDevice
from hetero.errors import LinkError
from hetero.transport.base import Work
from hetero.transport.ordered.ring import Direction, EndState, ahead


class EnqueuingLink(Protocol):
    """What a transfer asks of its link."""

    def progress_until_enqueued(self, transfer: OrderedTransfer) -> None:
        """Return once all of the transfer is in a stream, or it has failed."""

    def look_after(self) -> None:
        """See that transfers get into a stream though nobody waits for them."""


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


class Arrival:
    """The point at which a counter that this end's device writes comes to a value.

    A peer that gives up writes it too, to release its own device, after it has said so.
    """

    def __init__(
        self,
        device: OrderedDevice,
        word: int,
        count: int,
        *,
        read: Callable[[], int],
        peer: EndState,
        caller: int | None,
    ) -> None:
        self._device, self._word, self._count, self._read = device, word, count, read
        self._peer = peer
        self._caller = caller
        """The caller's stream that writes it; None for a stream of the link."""
        self._reached = False

    def reached(self) -> bool:
        """Never blocks. True for ever, also when the link and its counters are gone."""
        if not self._reached:
            is_there = ahead(self._count, self._read()) <= 0
            self._reached = is_there and not self._peer.has_failed
        return self._reached

    def order_current_stream(self) -> None:
        """Let the caller's current stream go on only after it; the calling thread goes on now."""
        if self.reached():
            return
        current = self._device.current_stream()
        if current.key != self._caller:
            current.wait_value(self._word, self._count)


@dataclass(eq=False, slots=True)
class OrderedTransfer(Work):
    """A tensor on its way through a stream of its link."""

    link: EnqueuingLink
    tensor: torch.Tensor
    ready: Mark | None
    """What the caller had enqueued before it; None while it may still go into the same stream."""
    caller: int
    """The caller's stream."""
    is_receive: bool
    deadline: float
    sequence: int
    header: bytes
    nbytes: int
    address: int
    offset: int = 0
    begun: bool = False
    landed: Arrival | None = None
    """Set once all of it has been enqueued."""
    error: LinkError | None = None

    def done(self) -> bool:
        if self.error is not None:
            return True
        if self.landed is None:
            self.link.look_after()
            return False
        return self.landed.reached()

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
