"""What a link over a ring keeps of its ends and of the transfers under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hetero.device.device import Event
from hetero.errors import LinkError
from hetero.link.base import Work
from hetero.link.ring import Direction, EndState

if TYPE_CHECKING:
    from hetero.link.flow import Flow
    from hetero.link.ring_link import RingLink


@dataclass(frozen=True)
class RingEnds:
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
    in_place: bool
    """Whether larger messages go out of the callers' tensors and into them, past the rings."""
    peer_has_gone: Callable[[], bool]
    close: Callable[[], None]


class CompletionFlag:
    """The point at which a device is done with so many entries of one direction.

    Args:
        consumed: whether it is the receiver's device that is meant, not the sender's.
        caller: the caller's stream that the last of them went into; None for one of the link.
    """

    __slots__ = ("_caller", "_consumed", "_count", "_flow", "_is_completed")

    def __init__(self, flow: Flow, count: int, *, consumed: bool, caller: int | None) -> None:
        self._flow, self._count, self._caller = flow, count, caller
        self._consumed = consumed
        self._is_completed = False

    def is_completed(self) -> bool:
        """Never blocks. True for ever, also when the link and its counters are gone."""
        if not self._is_completed:
            self._is_completed = self._flow.has_completed(self._count, consumed=self._consumed)
        return self._is_completed

    def wait_on_current_stream(self) -> None:
        """Let the caller's current stream go on only after it; the calling thread goes on now."""
        current = self._flow.device.current_stream()
        if current.key != self._caller and not self.is_completed():
            current.wait_value(self._flow.completed_word(self._count, consumed=self._consumed))


@dataclass(eq=False, slots=True)
class RingTransfer(Work):
    """A tensor on its way through a stream of its link."""

    link: RingLink
    tensor: torch.Tensor
    ready: Event | None
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
    completion: CompletionFlag | None = None
    """Set once all of it has been enqueued."""
    error: LinkError | None = None

    def is_completed(self) -> bool:
        if self.error is not None:
            return True
        if self.completion is None:
            self.link.request_progress()
            return False
        return self.completion.is_completed()

    def wait(self) -> None:
        """Order the current stream after the transfer.

        Blocks the calling thread only until the peer's side has been enqueued as well.
        """
        if self.completion is None and self.error is None:
            self.link.progress_until_enqueued(self)
        if self.error is not None:
            raise self.error
        assert self.completion is not None
        self.completion.wait_on_current_stream()
        # A device that is the host has waited; it must not be given what a failure released, of
        # which this end may not have heard yet.
        if not self.completion.is_completed():
            self.link.check()
        if self.error is not None:
            raise self.error
