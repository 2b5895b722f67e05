"""The ring's control segment as Python sees it. `hetero/native/ring.h` says what lies where.

`docs/ring.md` explains the four counters and the rule that keeps two devices from waiting for each
other for ever. Whatever the other end sees is written by C, in order with what was written before.
"""

from __future__ import annotations

from ctypes import sizeof
from typing import NamedTuple

from hetero.link.shared_memory import PAGE, SharedMemory
from hetero.native.binding import native
from hetero.native.structures import (
    RING_FAULT_BYTES,
    RingControl,
    RingDirection,
    RingEnd,
    RingRecord,
)

ENTRIES = RingDirection.records.size // sizeof(RingRecord)
COUNTER_MASK = 0xFFFFFFFF
"""Counters are words of 32 bits: they count round."""
HALF_ROUND = 0x80000000
"""One that is so far ahead of another, or further, is behind it."""
_USER_BUFFERS_BYTES = RingControl.user_buffers.size // 2
CONTROL_BYTES = -(-sizeof(RingControl) // PAGE) * PAGE


def ahead(newer: int, older: int) -> int:
    """How far one wrapping 32-bit counter is ahead of another; negative when it is behind."""
    return ((newer - older + HALF_ROUND) & COUNTER_MASK) - HALF_ROUND


class Entry(NamedTuple):
    """One record: a message's header, and which of its bytes lie where in the ring."""

    header: bytes
    offset: int
    nbytes: int
    slot: int


class Direction:
    """One direction's counters and records, as both ends see them.

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
        self.posted_address = self.address + RingDirection.posted.offset
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

    def entry(self, number: int) -> Entry:
        begin = self._records + number % ENTRIES * sizeof(RingRecord)
        record = RingRecord.from_buffer_copy(self._bytes, begin)
        return Entry(bytes(record.header), record.offset, record.nbytes, record.slot)

    def release_receiver(self, value: int) -> None:
        """Let a stream that waits for `produced` go on. Only for a link that has failed."""
        self._write(RingDirection.produced.offset, value)

    def release_sender(self, value: int) -> None:
        """Let a stream that waits for `consumed` go on. Only for a link that has failed."""
        self._write(RingDirection.consumed.offset, value)

    def _write(self, word: int, value: int) -> None:
        native().host_write_word(self.address + word, value & COUNTER_MASK)


class EndState:
    """One end's doorbell, and its word on how it ended."""

    def __init__(self, control: SharedMemory, side: int) -> None:
        offset = RingControl.ends.offset + side * sizeof(RingEnd)
        self._words, self._bytes = control.words, control.bytes
        self._address = control.address + offset
        self._doorbell = (offset + RingEnd.doorbell.offset) // 4
        self._closed = (offset + RingEnd.closed.offset) // 4
        self._fault_bytes = (offset + RingEnd.fault_bytes.offset) // 4
        self._fault = offset + RingEnd.fault.offset
        self._library = native()

    @property
    def doorbell(self) -> int:
        return self._words[self._doorbell]

    def doorbell_address(self) -> int:
        """Where this process has the doorbell; 0 if it wakes nobody to write there."""
        return self._address + RingEnd.doorbell.offset

    def ring(self) -> None:
        """Wake this end."""
        self._library.host_ring_doorbell(self._address + RingEnd.doorbell.offset)

    def sleep(self, expected: int, seconds: float) -> None:
        """Sleep until this end's doorbell rings, without the GIL."""
        doorbell = self._address + RingEnd.doorbell.offset
        self._library.host_wait_doorbell(doorbell, expected, int(seconds * 1000))

    @property
    def is_closed(self) -> bool:
        return self._words[self._closed] != 0

    def close(self) -> None:
        self._library.host_write_word(self._address + RingEnd.closed.offset, 1)

    @property
    def has_failed(self) -> bool:
        return self._words[self._fault_bytes] != 0

    @property
    def fault(self) -> str | None:
        """Why this end takes part no more; None while it does."""
        length = self._library.host_read_word(self._address + RingEnd.fault_bytes.offset)
        text = bytes(self._bytes[self._fault : self._fault + length])
        return text.decode(errors="replace") if length else None

    def fail(self, reason: str) -> None:
        """Take part no more, for a reason that the peer is told. Called before it is let go on."""
        data = reason.encode()[:RING_FAULT_BYTES]
        self._bytes[self._fault : self._fault + len(data)] = data
        self._library.host_write_word(self._address + RingEnd.fault_bytes.offset, len(data))
