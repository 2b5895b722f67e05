"""The shared state of a ring link's two ends, and one transfer."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hetero.device.device import Event
from hetero.errors import LinkError
from hetero.link.base import Work
from hetero.link.header import unnumbered_header
from hetero.link.ring import Direction, EndState
from hetero.native.structures import HeaderState, Progress, Transfer

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


BYTES_TRANSFER = struct.Struct("@" + "".join(kind._type_ for _, kind in Transfer._fields_[:-1]))
"""`struct transfer` of bytes, whose header, the last member, C makes."""
_TENSOR_TRANSFER = struct.Struct(f"{BYTES_TRANSFER.format}{Transfer.header.size}s")
_UNNUMBERED = int(HeaderState.WITHOUT_NUMBERS)
_BEGUN = Progress.ENQUEUED, Progress.FAILED


@dataclass(eq=False, slots=True)
class RingTransfer(Work):
    """A transfer of one tensor over a ring link."""

    link: RingLink
    flow: Flow
    """Its direction."""
    tensor: torch.Tensor | None
    """None once the caller's stream waits for the transfer, or it is complete: then its memory may
    be used again in the order of that stream, long before the device has come there."""
    state: Any
    """Its `struct transfer`."""
    event: Event | None = None
    """The end of the caller's earlier work; None while it may go to the same stream."""
    begun_at: float = field(default_factory=time.monotonic)
    end_count: int | None = None
    """Its direction's entry count after its last entry; None until that is enqueued."""
    error: LinkError | None = None
    _is_completed: bool = False

    @property
    def header(self) -> bytes:
        return bytes(self.state.header)

    @property
    def has_begun(self) -> bool:
        """Whether streams may copy from or to the tensor."""
        return self.state.offset > 0 or self.state.progress in _BEGUN

    def follow(self, event: Event) -> None:
        """Have the transfer follow an event, instead of what its caller's stream was given."""
        self.event = event
        self.state.event, self.state.after_caller = event.handle, False

    def is_completed(self) -> bool:
        """Stays true, also after the link is closed."""
        if self._is_completed or self.error is not None:
            return True
        if self.end_count is None:
            self.link.request_progress()
            return False
        self._is_completed = self.flow.has_completed(
            self.end_count, consumed=self.state.completes_at_receiver
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
        state = self.state
        is_in_order = state.on_caller_stream and current.key == state.caller_stream
        if not is_in_order and not self.is_completed():
            consumed = state.completes_at_receiver
            self.link.wait_value(
                current, self.flow.completed_word(self.end_count, consumed=consumed)
            )
        # On a host device the thread has waited: check that no failure has unblocked it.
        if not self.is_completed():
            self.link.check()
        if self.error is not None:
            raise self.error
        self.tensor = None


def new_transfer(
    link: RingLink,
    flow: Flow,
    tensor: torch.Tensor,
    caller_stream: int,
    event: Event | None,
    tag: int,
) -> RingTransfer:
    """A transfer of which nothing is enqueued yet. Positional: keywords cost a microsecond."""
    header = unnumbered_header(tensor.dtype, tensor.shape)
    state, handle = Transfer(), 0 if event is None else event.handle
    given = flow.address, tensor.data_ptr(), tensor.nbytes, caller_stream, handle, tag
    after_caller = event is None
    try:
        _TENSOR_TRANSFER.pack_into(
            state, 0, *given, after_caller, _UNNUMBERED, 0, 0, 0, 0, 0, header
        )
    except struct.error as error:
        raise ValueError(f"tag {tag!r} is no whole number from 0 to 4294967295") from error
    return RingTransfer(link, flow, tensor, state, event)
