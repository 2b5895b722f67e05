"""The shared state of a ring link's two ends, and one transfer."""

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
    """The memory that both ends of a ring link have mapped, and its cleanup."""

    outgoing: Direction
    incoming: Direction
    local: EndState
    peer: EndState
    outgoing_ring: int
    incoming_ring: int
    """Addresses for this end's device."""
    peer_has_ended: Callable[[], bool]
    close: Callable[[], None]


@dataclass(eq=False, slots=True)
class RingTransfer(Work):
    """A transfer of one tensor over a ring link."""

    link: RingLink
    flow: Flow
    """Its direction."""
    tensor: torch.Tensor | None
    """None once the caller's stream waits for the transfer, or it is complete: then its memory may
    be used again in the order of that stream, long before the device has come there."""
    ready: Event | None
    """The end of the caller's earlier work; None while it may go to the same stream."""
    caller_stream: int
    is_receive: bool
    begun_at: float
    sequence: int
    header: bytes
    nbytes: int
    address: int
    offset: int = 0
    has_begun: bool = False
    end_count: int | None = None
    """Its direction's entry count after its last entry; None until that is enqueued."""
    completes_at_receiver: bool = False
    """Whether it is complete when the receiver's device has consumed it, not the sender's."""
    is_on_caller_stream: bool = False
    """Whether all of it went to the caller's stream."""
    error: LinkError | None = None
    _is_completed: bool = False

    def is_completed(self) -> bool:
        """Stays true, also after the link is closed."""
        if self._is_completed or self.error is not None:
            return True
        if self.end_count is None:
            self.link.request_progress()
            return False
        self._is_completed = self.flow.has_completed(
            self.end_count, consumed=self.completes_at_receiver
        )
        return self._is_completed

    def wait(self) -> None:
        """Make the current stream wait for the transfer.

        Blocks the calling thread only until the peer has enqueued its side.
        """
        if self.end_count is None and self.error is None:
            self.link.progress_until_enqueued(self)
        if self.error is not None:
            raise self.error
        assert self.end_count is not None
        current = self.flow.device.current_stream()
        is_in_order = self.is_on_caller_stream and current.key == self.caller_stream
        if not is_in_order and not self.is_completed():
            word = self.flow.completed_word(self.end_count, consumed=self.completes_at_receiver)
            self.link.wait_value(current, word)
        # On a host device the thread has waited: check that no failure has unblocked it.
        if not self.is_completed():
            self.link.check()
        if self.error is not None:
            raise self.error
        self.tensor = None
