"""A ring between two devices of one host, filled and emptied by their streams.

The data lie in memory that both devices reach: host memory that both have pinned (`shm`), or the
sender's device memory that the receiver's device has opened (`ipc`). Beside it lies one control
segment of host memory. For each direction it holds a record for every entry (a message or a part of
one), and two pairs of counters:

- `posted` and `retired` are written by the CPUs: so many entries have been put into the sender's
  stream, and taken out in the receiver's;
- `produced` and `consumed` are written by the devices when they get there.

A stream is made to wait for `produced` only after the CPU has seen the entry `posted`, and for
`consumed` only after it was `retired`. So work is enqueued only after all work that it waits for
has been, on whichever side: no order of the two sides, no shared hardware queue and no call that
waits for the whole device (loading a kernel does) can make them wait for each other.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from hetero.link.header import HEADER_BYTES
from hetero.link.shared_memory import PAGE, SharedMemory

ENTRIES = 256
ALIGNMENT = 512
_RECORD = struct.Struct(f"<{HEADER_BYTES}sQQQ")
COUNTER_MASK = 0xFFFFFFFF
"""Counters are words of 32 bits: they count round."""

# The control segment: a part for each end, then a part for each direction.
_DOORBELL, _CLOSED, _FAULT = 0, 64, 128
FAULT_BYTES = 1024
_SIDE_BYTES = 2048
_PRODUCED, _CONSUMED, _POSTED, _RETIRED, _RECORDS = 0, 64, 128, 192, 256
RECORD_BYTES = _RECORD.size
NBYTES_IN_RECORD = struct.calcsize(f"<{HEADER_BYTES}sQ")
PLACE_IN_RECORD = struct.calcsize(f"<{HEADER_BYTES}sQQ")
_DIRECTION_BYTES = -(-(_RECORDS + ENTRIES * _RECORD.size) // 64) * 64
CONTROL_BYTES = -(-(2 * _SIDE_BYTES + 2 * _DIRECTION_BYTES) // PAGE) * PAGE


def ahead(newer: int, older: int) -> int:
    """How far one wrapping 32-bit counter is ahead of another; negative when it is behind."""
    return ((newer - older + 0x80000000) & COUNTER_MASK) - 0x80000000


class DirectionPlaces(NamedTuple):
    """Offsets of one direction's words and records in the control segment."""

    posted: int
    retired: int
    produced: int
    consumed: int
    records: int

    @classmethod
    def of(cls, number: int) -> DirectionPlaces:
        """The direction by its number, as for `Direction`."""
        base = 2 * _SIDE_BYTES + number * _DIRECTION_BYTES
        return cls(
            posted=base + _POSTED,
            retired=base + _RETIRED,
            produced=base + _PRODUCED,
            consumed=base + _CONSUMED,
            records=base + _RECORDS,
        )


def doorbell_place(side: int) -> int:
    """The offset of an end's doorbell in the control segment."""
    return side * _SIDE_BYTES + _DOORBELL


class Entry(NamedTuple):
    """One record: a message's header, and which of its bytes lie where in the ring."""

    header: bytes
    offset: int
    nbytes: int
    place: int


class Direction:
    """One direction's counters and records, as both ends see them.

    Args:
        control: the control segment.
        number: 0 for what the listener sends, 1 for what the caller sends.
        device_base: the device's address of the control segment.
    """

    def __init__(self, control: SharedMemory, number: int, device_base: int) -> None:
        places = DirectionPlaces.of(number)
        self._words = control.words
        self._bytes = control.bytes
        self._records = places.records
        self._places, self._address = places, control.address
        self._produced, self._consumed = places.produced // 4, places.consumed // 4
        self._posted, self._retired = places.posted // 4, places.retired // 4
        self.produced_word = device_base + places.produced
        self.consumed_word = device_base + places.consumed

    @property
    def produced(self) -> int:
        return self._words[self._produced]

    @property
    def consumed(self) -> int:
        return self._words[self._consumed]

    def host_addresses(self) -> DirectionPlaces:
        """Where this process has the words and the records."""
        return DirectionPlaces(*(self._address + place for place in self._places))

    @property
    def posted(self) -> int:
        return self._words[self._posted]

    @property
    def retired(self) -> int:
        return self._words[self._retired]

    def entry(self, number: int) -> Entry:
        where = self._records + number % ENTRIES * _RECORD.size
        return Entry(*_RECORD.unpack_from(self._bytes, where))

    def release_receiver(self, value: int) -> None:
        """Let a stream that waits for `produced` go on. Only for a link that has failed."""
        self._words[self._produced] = value & COUNTER_MASK

    def release_sender(self, value: int) -> None:
        """Let a stream that waits for `consumed` go on. Only for a link that has failed."""
        self._words[self._consumed] = value & COUNTER_MASK


class EndState:
    """One end's doorbell, and its word on how it ended."""

    def __init__(self, control: SharedMemory, side: int) -> None:
        self._control = control
        self._base = side * _SIDE_BYTES
        self._words = control.words
        self._bell = (self._base + _DOORBELL) // 4
        self._fault_length = (self._base + _FAULT) // 4

    @property
    def doorbell(self) -> int:
        return self._words[self._bell]

    def doorbell_address(self) -> int:
        """Where this process has the doorbell; 0 if it wakes nobody to write there."""
        return self._control.address + self._base + _DOORBELL

    def ring(self) -> None:
        """Wake this end. Only the other end calls it, so that no count is lost."""
        self._words[self._bell] = (self._words[self._bell] + 1) & COUNTER_MASK
        self._control.wake(self._base + _DOORBELL)

    def sleep(self, while_it_is: int, seconds: float) -> None:
        """Sleep until this end's doorbell rings, without the GIL."""
        self._control.sleep(self._base + _DOORBELL, while_it_is, seconds)

    @property
    def is_closed(self) -> bool:
        return self._control.load(self._base + _CLOSED) != 0

    def close(self) -> None:
        self._control.store(self._base + _CLOSED, 1)

    @property
    def has_failed(self) -> bool:
        return self._words[self._fault_length] != 0

    @property
    def fault(self) -> str | None:
        """Why this end takes part no more; None while it does."""
        length = self._control.load(self._base + _FAULT)
        if not length:
            return None
        begin = self._base + _FAULT + 4
        return bytes(self._control.bytes[begin : begin + length]).decode(errors="replace")

    def fail(self, reason: str) -> None:
        data = reason.encode()[:FAULT_BYTES]
        begin = self._base + _FAULT + 4
        self._control.bytes[begin : begin + len(data)] = data
        self._control.store(self._base + _FAULT, len(data))
