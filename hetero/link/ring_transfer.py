"""What an ordered link keeps of its ends and of the transfers under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from hetero.device.base import Mark
from hetero.device.ordered import OrderedDevice, Word
from hetero.errors import LinkError
from hetero.link.base import Work
from hetero.link.ring import COUNTER_MASK, Direction, EndState, ahead


class EnqueuingLink(Protocol):
    """What a transfer asks of its link."""

    def progress_until_enqueued(self, transfer: OrderedTransfer) -> None:
        """Return once all of the transfer is in a stream, or it has failed."""

    def check(self) -> None:
        """Raise what broke the link, if anything did."""

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


class DoneCounter:
    """The counter that this end's device writes after each entry of one direction.

    A peer that gives up writes it too, to release its own device, after it has said so.
    """

    def __init__(
        self, device: OrderedDevice, address: int, *, read: Callable[[], int], peer: EndState
    ) -> None:
        self.device = device
        self.peer = peer
        self._address = address
        self._read = read

    def word(self, count: int) -> Word:
        """What the device writes when it is done with so many entries."""
        return Word(self._address, count & COUNTER_MASK)

    def has_come_to(self, count: int) -> bool:
        return ahead(count & COUNTER_MASK, self._read()) <= 0


class Arrival:
    """The point at which a device is done with so many entries.

    Args:
        caller: the caller's stream that the last of them went into; None for one of the link.
    """

    __slots__ = ("_caller", "_count", "_done", "_reached")

    def __init__(self, done: DoneCounter, count: int, caller: int | None) -> None:
        self._done, self._count, self._caller = done, count, caller
        self._reached = False

    def reached(self) -> bool:
        """Never blocks. True for ever, also when the link and its counters are gone."""
        if not self._reached:
            done = self._done
            self._reached = done.has_come_to(self._count) and not done.peer.has_failed
        return self._reached

    def order_current_stream(self) -> None:
        """Let the caller's current stream go on only after it; the calling thread goes on now."""
        current = self._done.device.current_stream()
        if current.key != self._caller and not self.reached():
            current.wait_value(self._done.word(self._count))


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
        # A device that is the host has waited; it must not be given what a failure released, of
        # which this end may not have heard yet.
        if not self.landed.reached():
            self.link.check()
        if self.error is not None:
            raise self.error
