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
    zero_copy: bool
    """Whether larger messages go out of the callers' tensors and into them, past the rings."""
    peer_has_gone: Callable[[], bool]
    close: Callable[[], None]


@dataclass(eq=False, slots=True)
class RingTransfer(Work):
    """A tensor on its way through a stream of its link."""

    link: RingLink
    flow: Flow
    """The direction in which it goes."""
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
    end: int | None = None
    """How many entries of its direction there are up to its last; None until that is enqueued."""
    ends_at_receiver: bool = False
    """Whether the receiver's device has to be done with them, and not the sender's."""
    is_in_callers_stream: bool = False
    """Whether they are in no stream of the link."""
    error: LinkError | None = None
    _has_ended: bool = False

    def is_completed(self) -> bool:
        """True for ever, also when the link and its counters are gone."""
        if self._has_ended or self.error is not None:
            return True
        if self.end is None:
            self.link.request_progress()
            return False
        self._has_ended = self.flow.has_completed(self.end, consumed=self.ends_at_receiver)
        return self._has_ended

    def wait(self) -> None:
        """Order the current stream after the transfer.

        Blocks the calling thread only until the peer's side has been enqueued as well.
        """
        if self.end is None and self.error is None:
            self.link.progress_until_enqueued(self)
        if self.error is not None:
            raise self.error
        assert self.end is not None
        current = self.flow.device.current_stream()
        is_in_order = self.is_in_callers_stream and current.key == self.caller
        if not is_in_order and not self.is_completed():
            word = self.flow.completed_word(self.end, consumed=self.ends_at_receiver)
            current.wait_value(word)
        # A device that is the host has waited; it must not be given what a failure released, of
        # which this end may not have heard yet.
        if not self.is_completed():
            self.link.check()
        if self.error is not None:
            raise self.error
