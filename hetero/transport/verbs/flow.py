"""What each end of a direction knows of its chunks. No verbs here: numbers only.

Chunks are numbered from 0 on. Chunk n lies in slot n % slots on both sides. Numbers travel as 32
bits and are made whole again here.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field

from hetero.transport.chunked import Chunk
from hetero.transport.header import HEADER_BYTES

_RECORD = struct.Struct(f"<{HEADER_BYTES}sQQI")
RECORD_BYTES = _RECORD.size
RECORD_STRIDE = -(-RECORD_BYTES // 64) * 64
_WRAP = 0xFFFFFFFF


def pack_record(chunk: Chunk) -> bytes:
    return _RECORD.pack(chunk.header, chunk.offset, chunk.nbytes, chunk.checksum)


def unpack_record(data: bytes | memoryview) -> Chunk:
    return Chunk(*_RECORD.unpack(data))


@dataclass(eq=False)
class Outgoing:
    """The sender's view of one direction."""

    slots: int
    acquired: int = 0
    published: int = 0
    released: int = 0
    """How many the receiver has given back, as far as it has told."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of every chunk that is published and whose arrival is not known."""
    on_rail: dict[int, int] = field(default_factory=dict)
    """The rail on which each of those is that has been posted."""
    waiting: deque[int] = field(default_factory=deque)
    """Those that are not, oldest first."""
    landed: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Those that have arrived and are not released: the rail that brought each, and its bytes."""

    def acquire(self) -> int | None:
        """The number of the next chunk, if its slot is free on both sides."""
        before = self.acquired - self.slots
        if before >= 0 and (before >= self.released or before in self.sizes):
            return None
        self.acquired += 1
        return self.acquired - 1

    def publish(self, nbytes: int) -> int:
        number = self.published
        self.published += 1
        self.sizes[number] = nbytes
        self.waiting.append(number)
        return number

    def credit(self, released: int) -> None:
        """The receiver's count. One that was overtaken by a later one changes nothing."""
        ahead = (released - self.released) & _WRAP
        if ahead <= self.published - self.released:
            for number in range(self.released, self.released + ahead):
                self.landed.pop(number, None)
            self.released += ahead

    def post(self, rail: int) -> int:
        """Put the oldest waiting chunk on a rail; returns its number."""
        number = self.waiting.popleft()
        self.on_rail[number] = rail
        return number

    def complete(self, number: int, rail: int) -> None:
        """The chunk has arrived, says the rail that it was posted on."""
        if self.on_rail.get(number) == rail:
            del self.on_rail[number]
            nbytes = self.sizes.pop(number)
            if number >= self.released:
                self.landed[number] = (rail, nbytes)

    def repeat(self, rail: int, *, landed: bool = False) -> int:
        """Have the unacknowledged chunks of a lost rail posted again; returns how many.

        With `landed` the others too: they have arrived, but the receiver may not have been able to
        use them. What it has given back it has used, whatever the rail said.
        """
        if landed:
            for number in [n for n, (on, _) in self.landed.items() if on == rail]:
                self.on_rail[number], self.sizes[number] = self.landed.pop(number)
        numbers = sorted(n for n, on in self.on_rail.items() if on == rail)
        for number in numbers:
            del self.on_rail[number]
            if number < self.released:
                del self.sizes[number]
        again = [number for number in numbers if number >= self.released]
        self.waiting = deque(sorted([*again, *self.waiting]))
        return len(again)


@dataclass(eq=False)
class Incoming:
    """The receiver's view of one direction."""

    slots: int
    taken: int = 0
    released: int = 0
    told: int = 0
    """The count that the sender was told last."""
    telling_lost: bool = False
    """Whether what was told may never have arrived."""
    arrived: dict[int, Chunk] = field(default_factory=dict)

    def place(self, number: int) -> int | None:
        """The whole number of a chunk that has arrived; None for one that came before."""
        ahead = (number - self.taken) & _WRAP
        if ahead >= self.slots or self.taken + ahead in self.arrived:
            return None
        return self.taken + ahead

    def arrive(self, number: int, chunk: Chunk) -> None:
        """The chunk can be taken. One that came before over another rail changes nothing."""
        if self.place(number) is not None:
            self.arrived[number] = chunk

    def take(self) -> tuple[int, Chunk] | None:
        """The next chunk in order, if it has arrived."""
        chunk = self.arrived.pop(self.taken, None)
        if chunk is None:
            return None
        self.taken += 1
        return self.taken - 1, chunk

    def release(self) -> None:
        self.released += 1

    def owes(self) -> bool:
        """Whether enough slots have been given back to be worth a message."""
        return self.telling_lost or self.released - self.told >= max(1, self.slots // 4)

    def tell(self) -> int:
        """The count to send now."""
        self.told, self.telling_lost = self.released, False
        return self.released & _WRAP
