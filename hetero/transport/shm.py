"""CPU forwarding between two processes of one host: a ring in shared memory, pinned for the GPU.

A slot that the sender has filled is the slot that the receiver reads: there is no copy between
them, only a counter.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass

import torch

from hetero.device.base import DeviceRuntime
from hetero.transport.chunked import Chunk, RecvEnd, RingShape, SendEnd
from hetero.transport.handshake import Meeting, compare, receive_exactly
from hetero.transport.header import HEADER_BYTES, PROTOCOL_VERSION
from hetero.transport.same_host import PAGE, SharedMemory, has_gone, join, share_memory

# One page of control: two counters on cache lines of their own, a refusal, then a record a slot.
_PRODUCED, _CONSUMED, _CLOSED, _REFUSED = 0, 64, 128, 192
_REFUSAL_BYTES = 512
_RECORDS = 1024
_RECORD = struct.Struct(f"<{HEADER_BYTES}sQQI")
_LIVENESS_SECONDS = 0.1


def _data_offset(shape: RingShape) -> int:
    """Where the slots begin: on the page after the control words and the records."""
    return -(-(_RECORDS + shape.slots * _RECORD.size) // PAGE) * PAGE


def _total_bytes(shape: RingShape) -> int:
    return _data_offset(shape) + shape.slots * shape.slot_bytes


class SharedRing:
    """One direction's memory, as either side maps it."""

    def __init__(self, memory: SharedMemory, shape: RingShape, runtime: DeviceRuntime) -> None:
        self.shape = shape
        self._runtime = runtime
        self._memory = memory
        self.bytes = memory.bytes
        self.load = memory.load
        self.sleep = memory.sleep
        self._data: torch.Tensor | None = memory.tensor[_data_offset(shape) :]
        runtime.register(self._data)

    def slot(self, number: int) -> torch.Tensor:
        assert self._data is not None
        begin = number % self.shape.slots * self.shape.slot_bytes
        return self._data[begin : begin + self.shape.slot_bytes]

    def store(self, word: int, value: int) -> None:
        self._memory.store(word, value)
        self._memory.wake(word)

    def record_at(self, number: int) -> int:
        return _RECORDS + number % self.shape.slots * _RECORD.size

    def close(self) -> None:
        if self._data is None:
            return
        self._runtime.unregister(self._data)
        self._data = None
        self._memory.close()


class _End:
    """What both ends of a shared ring do: wait on a counter, and notice that the peer has gone."""

    def __init__(self, ring: SharedRing, control: socket.socket, peer: int) -> None:
        self._ring = ring
        self._control = control
        self._peer = peer
        self._closed = False
        self.slot_bytes = ring.shape.slot_bytes

    def _wait(self, word: int, value: int, deadline: float) -> None:
        """Sleep until the word changes from `value`, at most one slice of time."""
        if self._closed:
            raise ConnectionError("the link was closed")
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"rank {self._peer} did not move within the time allowed")
        self._ring.sleep(word, value, min(remaining, _LIVENESS_SECONDS))
        if self._ring.load(word) == value and has_gone(self._control):
            raise ConnectionError(f"rank {self._peer} has ended or closed the link")

    def _refusal(self) -> str | None:
        length = self._ring.load(_REFUSED)
        if not length:
            return None
        begin = _REFUSED + 4
        return bytes(self._ring.bytes[begin : begin + length]).decode(errors="replace")


def _behind(newer: int, older: int) -> int:
    """How far one wrapping 32-bit counter is ahead of another."""
    return (newer - older) & 0xFFFFFFFF


class ShmSendEnd(_End, SendEnd):
    """Fills slots and counts them as produced."""

    def __init__(self, ring: SharedRing, control: socket.socket, peer: int) -> None:
        super().__init__(ring, control, peer)
        self._acquired = 0
        self._published = 0

    def acquire(self, deadline: float | None) -> torch.Tensor | None:
        while True:
            consumed = self._ring.load(_CONSUMED)
            if (reason := self._refusal()) is not None:
                raise ConnectionError(reason)
            if _behind(self._acquired, consumed) < self._ring.shape.slots:
                slot = self._ring.slot(self._acquired)
                self._acquired += 1
                return slot
            if deadline is None:
                return None
            self._wait(_CONSUMED, consumed, deadline)

    def publish(self, chunk: Chunk) -> None:
        _RECORD.pack_into(
            self._ring.bytes,
            self._ring.record_at(self._published),
            chunk.header,
            chunk.offset,
            chunk.nbytes,
            chunk.checksum,
        )
        self._published += 1
        self._ring.store(_PRODUCED, self._published)

    def close(self) -> None:
        self._closed = True


class ShmRecvEnd(_End, RecvEnd):
    """Reads produced slots and counts them as consumed."""

    def __init__(self, ring: SharedRing, control: socket.socket, peer: int) -> None:
        super().__init__(ring, control, peer)
        self._taken = 0
        self._released = 0

    def take(self, deadline: float | None) -> tuple[Chunk, torch.Tensor] | None:
        while True:
            produced = self._ring.load(_PRODUCED)
            if _behind(produced, self._taken) > 0:
                break
            if deadline is None:
                return None
            self._wait(_PRODUCED, produced, deadline)
        chunk = Chunk(*_RECORD.unpack_from(self._ring.bytes, self._ring.record_at(self._taken)))
        slot = self._ring.slot(self._taken)
        self._taken += 1
        return chunk, slot[: chunk.nbytes]

    def release(self) -> None:
        self._released += 1
        self._ring.store(_CONSUMED, self._released)

    def refuse(self, reason: str) -> None:
        data = reason.encode()[:_REFUSAL_BYTES]
        begin = _REFUSED + 4
        self._ring.bytes[begin : begin + len(data)] = data
        self._ring.store(_REFUSED, len(data))
        # A sender may sleep for a slot: let it look again.
        self._ring.store(_CONSUMED, self._released)

    def close(self) -> None:
        self._closed = True


@dataclass
class ShmEnds:
    """Both directions of one link, and what has to be released with them."""

    send: ShmSendEnd
    recv: ShmRecvEnd
    rings: tuple[SharedRing, SharedRing]
    control: socket.socket

    def close(self) -> None:
        self.control.close()
        for ring in self.rings:
            ring.close()


def open_shm(meeting: Meeting, *, shape: RingShape, runtime: DeviceRuntime) -> ShmEnds:
    """Open both directions. The listener makes the memory and hands it over."""
    control = join(meeting)
    compare(
        control,
        meeting,
        {"protocol": PROTOCOL_VERSION, "slots": shape.slots, "slot_bytes": shape.slot_bytes},
    )
    memories = share_memory(control, meeting, sizes=(_total_bytes(shape),) * 2)
    if not meeting.listens:
        memories.reverse()
    outgoing, incoming = (SharedRing(memory, shape, runtime) for memory in memories)
    # Neither goes on before both have mapped and pinned the rings.
    control.sendall(b"k")
    receive_exactly(control, 1)
    peer = meeting.description.peer
    return ShmEnds(
        send=ShmSendEnd(outgoing, control, peer),
        recv=ShmRecvEnd(incoming, control, peer),
        rings=(outgoing, incoming),
        control=control,
    )
