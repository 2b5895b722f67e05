"""The memory of a ring link: the control segment, its words, and what both ends agree on.

`hetero/native/ring.h` has the layout of the segment, docs/ring.md its use. Words that the other end
reads are written through C, which orders them after earlier writes; `host_acquire` comes between
the load of a word and the use of what it announces.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from ctypes import sizeof
from dataclasses import dataclass
from typing import Any

from hetero.device.device import Device
from hetero.link.handshake import Rendezvous, compare
from hetero.native.binding import (
    RING_ENTRIES,
    RING_FAULT_BYTES,
    RingControl,
    RingDirection,
    RingDoorbell,
    RingEnd,
    RingRecord,
    acquire_fence,
    native,
)
from hetero.observe.record import RailState
from hetero.version import PROTOCOL_VERSION

PAGE = 4096
COUNTER_MASK = 0xFFFFFFFF
"""Counters have 32 bits and wrap."""
HALF_RANGE = 0x80000000
"""A counter this far ahead of another, or further, is behind it."""
CONTROL_BYTES = -(-sizeof(RingControl) // PAGE) * PAGE
_USER_BUFFERS_BYTES = RingControl.user_buffers.size // 2


def ahead(newer: int, older: int) -> int:
    """The distance by which a wrapping counter is ahead of another; negative if it is behind.

    Either may have more than 32 bits.
    """
    return ((newer - older + HALF_RANGE) & COUNTER_MASK) - HALF_RANGE


class SharedMemory:
    """A mapping as bytes and as 32-bit words, both invalid after `close`."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Closes the descriptor."""
        try:
            self._map = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("I")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.nbytes = nbytes

    def close(self) -> None:
        """Idempotent."""
        self.words.release()
        self.bytes.release()
        self._map.close()


def make_memory(nbytes: int) -> int:
    """The descriptor of new anonymous memory, which lives until its last mapping is closed."""
    descriptor = os.memfd_create("hetero-ring", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def new_event(stack: ExitStack) -> int:
    """The descriptor of a new eventfd, which is closed when the stack unwinds."""
    event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    stack.callback(os.close, event)
    return event


def pin(memory: SharedMemory, device: Device, stack: ExitStack) -> int:
    """Map memory for a device until the stack unwinds; returns the device's address of it."""
    stack.callback(memory.close)
    address = device.register(memory.address, memory.nbytes)
    stack.callback(device.unregister, memory.address)
    return address


class Direction:
    """One direction's counters and records.

    Args:
        control: the control segment.
        number: 0 for what the listener sends, 1 for what the caller sends.
        device_base: the device's address of the control segment.
    """

    def __init__(self, control: SharedMemory, number: int, device_base: int) -> None:
        offset = RingControl.directions.offset + number * sizeof(RingDirection)
        self.address = control.address + offset
        self.produced_word = device_base + offset + RingDirection.produced.offset
        self.consumed_word = device_base + offset + RingDirection.consumed.offset
        buffers = RingControl.user_buffers.offset + number * _USER_BUFFERS_BYTES
        self.user_buffers_address = control.address + buffers
        self._words, self._bytes = control.words, control.bytes
        self._records = offset + RingDirection.records.offset
        self._produced = (offset + RingDirection.produced.offset) // 4
        self._consumed = (offset + RingDirection.consumed.offset) // 4
        self._posted = (offset + RingDirection.posted.offset) // 4
        self._retired = (offset + RingDirection.retired.offset) // 4

    @property
    def produced(self) -> int:
        return self._words[self._produced]

    @property
    def consumed(self) -> int:
        return self._words[self._consumed]

    @property
    def posted(self) -> int:
        return self._words[self._posted]

    @property
    def retired(self) -> int:
        return self._words[self._retired]

    def record(self, number: int) -> Any:
        """A copy of an entry's `struct ring_record`."""
        begin = self._records + number % RING_ENTRIES * sizeof(RingRecord)
        return RingRecord.from_buffer_copy(self._bytes, begin)

    def unblock(self, value: int, *, sender: bool) -> None:
        """Unblock who waits for the receiver's counter, as the sender does, or for the sender's.

        After setting the error flag.
        """
        word = RingDirection.consumed if sender else RingDirection.produced
        native().host_write_word(self.address + word.offset, value & COUNTER_MASK)


class EndState:
    """One end's doorbell, closed flag and error flag.

    Args:
        control: the control segment.
        side: 0 for the listener, 1 for the caller.
        wake: a function in C, and its argument, that wakes this end in place of its doorbell.
        event: if this process rings the end, the end's eventfd, which a ring writes while `arm`ed.
    """

    def __init__(
        self,
        control: SharedMemory,
        side: int,
        *,
        wake: tuple[Any, int | None] | None = None,
        event: int | None = None,
    ) -> None:
        offset = RingControl.ends.offset + side * sizeof(RingEnd)
        self._words, self._bytes = control.words, control.bytes
        self._address = control.address + offset
        self._doorbell = (offset + RingEnd.doorbell.offset) // 4
        self._closed = (offset + RingEnd.closed.offset) // 4
        self._fault_bytes = (offset + RingEnd.fault_bytes.offset) // 4
        self._fault = offset + RingEnd.fault.offset
        self._library = native()
        self.doorbell_address = self._address + RingEnd.doorbell.offset
        self.wake = wake or (self._library.host_ring_doorbell, self.doorbell_address)
        if event is not None:
            self._words[self._doorbell + RingDoorbell.event_fd.offset // 4] = event
        self.tell_peer: Callable[[str], None] = lambda reason: None
        """Called with this end's error; for a peer that does not see this memory."""
        self._acquire = acquire_fence()

    @property
    def doorbell(self) -> int:
        bell = self._words[self._doorbell]
        self._acquire()
        return bell

    def ring(self) -> None:
        """Wake this end."""
        function, argument = self.wake
        function(argument)

    def arm(self, expected: int) -> bool:
        """Have the next ring write this end's eventfd, once.

        False, and it does not, if the doorbell differs from `expected` already.
        """
        return bool(self._library.host_arm_doorbell(self.doorbell_address, expected))

    def sleep(self, expected: int, seconds: float, *, spin_seconds: float = 0.0) -> None:
        """Wait until the doorbell differs from `expected`, without the GIL.

        For `seconds` at most, of which it polls the first `spin_seconds`.
        """
        microseconds, milliseconds = int(spin_seconds * 1e6), int(seconds * 1e3)
        wait = self._library.host_wait_word
        wait(self.doorbell_address, expected + 1, microseconds, milliseconds)

    @property
    def is_closed(self) -> bool:
        is_closed = self._words[self._closed] != 0
        self._acquire()
        return is_closed

    def close(self) -> None:
        self._library.host_write_word(self._address + RingEnd.closed.offset, 1)

    @property
    def has_failed(self) -> bool:
        return self._words[self._fault_bytes] != 0

    @property
    def fault(self) -> str | None:
        """The error with which this end has failed; None while it has not."""
        length = self._words[self._fault_bytes]
        self._acquire()
        text = bytes(self._bytes[self._fault : self._fault + length])
        return text.decode(errors="replace") if length else None

    def fail(self, reason: str) -> None:
        """Set the error flag, which the peer sees. Do so before unblocking any stream."""
        data = reason.encode()[:RING_FAULT_BYTES]
        self._bytes[self._fault : self._fault + len(data)] = data
        self._library.host_write_word(self._address + RingEnd.fault_bytes.offset, len(data))
        self.tell_peer(reason)


@dataclass(frozen=True)
class Rails:
    """The rails of a link, for this rank's record."""

    states: tuple[RailState, ...] = ()
    retransmitted: int = 0
    """Entries of lost rails that were sent again over others."""


@dataclass(frozen=True)
class RingEnds:
    """The memory of both ends as one of them has it mapped, and its cleanup."""

    outgoing: Direction
    incoming: Direction
    local: EndState
    peer: EndState
    outgoing_ring: int
    incoming_ring: int
    """Addresses for this end's device."""
    event: int
    """The local end's eventfd, non-blocking."""
    peer_has_ended: Callable[[], bool]
    close: Callable[[], None]
    drive: Callable[[int, int], None] = lambda out, incoming: None
    """Have a carrier's threads enqueue what they can of the flows at two addresses (flow.h)."""
    rails: Callable[[], Rails] = Rails
    """The state of its rails, of which a ring in shared memory has none. From any thread."""


@dataclass(frozen=True)
class RingOptions:
    """The transport and sizes of a ring link, equal at both ends, and this end's device."""

    transport: str
    ring_bytes: int
    """The size of the ring of one direction."""
    chunk_bytes: int
    """The largest chunk of a message."""
    device: Device
    """Copies between this end's tensors and the rings."""

    @property
    def entry_bytes(self) -> int:
        """The largest entry: a ring holds two."""
        return min(self.chunk_bytes, self.ring_bytes // 2)

    @property
    def least_entry_bytes(self) -> int:
        """The smallest chunk of a message with several: all rails share small messages too."""
        return max(1, self.entry_bytes // 4) if self.transport == "tcp" else self.entry_bytes

    @property
    def zero_copy(self) -> bool:
        """True if larger messages skip the rings: the carrier can access the callers' tensors."""
        device = self.device
        return self.transport == "tcp" and device.has_host_tensors and device.checksum_bytes == 0

    def agree(self, connection: socket.socket, rendezvous: Rendezvous) -> None:
        """Raise LinkError, at both ends, unless they have the same protocol and options."""
        agreed = {
            "protocol": PROTOCOL_VERSION,
            "transport": self.transport,
            "ring_bytes": self.ring_bytes,
            "chunk_bytes": self.chunk_bytes,
            "checksum_bytes": self.device.checksum_bytes,
        }
        compare(connection, rendezvous, agreed)
