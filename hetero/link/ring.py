"""The ring's control segment in Python (layout: `hetero/native/ring.h`, meaning: `docs/ring.md`).

Write words that the other end reads only through C, which orders them after earlier writes. Call
`host_acquire` between loading a word and using what it announces (docs/ring.md).
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import sizeof
from typing import Any

from hetero.link.shared_memory import PAGE, SharedMemory
from hetero.native.binding import acquire_fence, native
from hetero.native.structures import (
    RING_FAULT_BYTES,
    RingControl,
    RingDirection,
    RingEnd,
    RingRecord,
)

ENTRIES = RingDirection.records.size // sizeof(RingRecord)
COUNTER_MASK = 0xFFFFFFFF
"""Counters have 32 bits and wrap."""
HALF_RANGE = 0x80000000
"""A counter this far ahead of another, or further, is behind it."""
_USER_BUFFERS_BYTES = RingControl.user_buffers.size // 2
CONTROL_BYTES = -(-sizeof(RingControl) // PAGE) * PAGE


def ahead(newer: int, older: int) -> int:
    """How far one wrapping 32-bit counter is ahead of another; negative when it is behind."""
    return ((newer - older + HALF_RANGE) & COUNTER_MASK) - HALF_RANGE


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
        begin = self._records + number % ENTRIES * sizeof(RingRecord)
        return RingRecord.from_buffer_copy(self._bytes, begin)

    def unblock(self, value: int, *, sender: bool) -> None:
        """Unblock a stream of the sender, or of the receiver, after setting the error flag."""
        word = RingDirection.consumed if sender else RingDirection.produced
        native().host_write_word(self.address + word.offset, value & COUNTER_MASK)


class EndState:
    """One end's doorbell, and its closed and error flags.

    `wake` is a function in C, and its argument, that wakes this end in place of its doorbell.
    """

    def __init__(
        self, control: SharedMemory, side: int, *, wake: tuple[Any, int | None] | None = None
    ) -> None:
        offset = RingControl.ends.offset + side * sizeof(RingEnd)
        self._words, self._bytes = control.words, control.bytes
        self._address = control.address + offset
        self._doorbell = (offset + RingEnd.doorbell.offset) // 4
        self._closed = (offset + RingEnd.closed.offset) // 4
        self._fault_bytes = (offset + RingEnd.fault_bytes.offset) // 4
        self._fault = offset + RingEnd.fault.offset
        self._library = native()
        self._doorbell_address = self._address + RingEnd.doorbell.offset
        self.wake = wake or (self._library.host_ring_doorbell, self._doorbell_address)
        self.tell_peer: Callable[[str], None] = lambda reason: None
        """Called with this end's error, where the peer does not see this memory."""
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

    def sleep(self, expected: int, seconds: float, *, spin_seconds: float = 0.0) -> None:
        """Poll for so long, then sleep until this end's doorbell rings, without the GIL."""
        microseconds, milliseconds = int(spin_seconds * 1e6), int(seconds * 1e3)
        wait = self._library.host_wait_word
        wait(self._doorbell_address, expected + 1, microseconds, milliseconds)

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
        """The error that this end has failed with; None while it has not."""
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
