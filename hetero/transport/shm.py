"""CPU forwarding between two processes of one host: a ring in shared memory, pinned for the GPU.

A slot that the sender has filled is the slot that the receiver reads: there is no copy between
them, only a counter. The segment has no name (memfd), is handed over a Unix socket, and so is
gone with the last process that holds it, however that process ends. The socket stays open: its
end is how a peer's death is noticed.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
import struct
import time
from dataclasses import dataclass

import torch

from hetero.device.base import DeviceRuntime
from hetero.transport import futex
from hetero.transport.chunked import Chunk, RecvEnd, RingShape, SendEnd
from hetero.transport.handshake import (
    Meeting,
    accept,
    compare,
    connect,
    exchange,
    look_up,
    publish,
    receive_exactly,
)
from hetero.transport.header import HEADER_BYTES, PROTOCOL_VERSION

# One page of control: two counters on cache lines of their own, a refusal, then a record a slot.
_PRODUCED, _CONSUMED, _CLOSED, _REFUSED = 0, 64, 128, 192
_REFUSAL_BYTES = 512
_RECORDS = 1024
_RECORD = struct.Struct(f"<{HEADER_BYTES}sQQI")
_PAGE = 4096
_LIVENESS_SECONDS = 0.1


def _data_offset(shape: RingShape) -> int:
    """Where the slots begin: on the page after the control words and the records."""
    return -(-(_RECORDS + shape.slots * _RECORD.size) // _PAGE) * _PAGE


def _total_bytes(shape: RingShape) -> int:
    return _data_offset(shape) + shape.slots * shape.slot_bytes


class SharedRing:
    """One direction's memory, as either side maps it."""

    def __init__(self, descriptor: int, shape: RingShape, runtime: DeviceRuntime) -> None:
        self.shape = shape
        self._runtime = runtime
        self._map = mmap.mmap(descriptor, _total_bytes(shape))
        self.bytes = memoryview(self._map)
        self._words = self.bytes.cast("I")
        self._whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._address = self._whole.data_ptr()
        self._data = self._whole[_data_offset(shape) :]
        runtime.register(self._data)
        self._open = True

    def slot(self, number: int) -> torch.Tensor:
        begin = number % self.shape.slots * self.shape.slot_bytes
        return self._data[begin : begin + self.shape.slot_bytes]

    def load(self, word: int) -> int:
        return int(self._words[word // 4])

    def store(self, word: int, value: int) -> None:
        self._words[word // 4] = value & 0xFFFFFFFF
        futex.wake(self._address + word)

    def sleep(self, word: int, while_it_is: int, seconds: float) -> None:
        futex.wait(self._address + word, while_it_is, seconds)

    def record_at(self, number: int) -> int:
        return _RECORDS + number % self.shape.slots * _RECORD.size

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._runtime.unregister(self._data)
        del self._data, self._whole
        self._words.release()
        self.bytes.release()
        # torch may hold the mapping a moment longer; it goes with its last reference.
        try:
            self._map.close()
        except BufferError:
            return


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
        if self._ring.load(word) == value and self._peer_has_gone():
            raise ConnectionError(f"rank {self._peer} has ended or closed the link")

    def _peer_has_gone(self) -> bool:
        poller = select.poll()
        poller.register(self._control, select.POLLIN | select.POLLHUP)
        return any(self._control.recv(1, socket.MSG_PEEK) == b"" for _ in poller.poll(0))

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


def can_share_memory(meeting: Meeting) -> bool:
    """Whether both ends run on one kernel that a Unix socket joins and futexes work on."""
    mine = {"boot": _boot_id(), "network": _network_namespace(), "futex": futex.available()}
    return exchange(meeting, "host", mine) == mine and futex.available()


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as stream:
        return stream.read().strip()


def _network_namespace() -> str:
    # Abstract Unix sockets live in the network namespace.
    return os.readlink("/proc/self/ns/net")


def open_shm(meeting: Meeting, *, shape: RingShape, runtime: DeviceRuntime) -> ShmEnds:
    """Open both directions. The listener makes the memory and hands it over."""
    control = _listen(meeting) if meeting.listens else _call(meeting)
    control.settimeout(meeting.timeout)
    compare(
        control,
        meeting,
        {"protocol": PROTOCOL_VERSION, "slots": shape.slots, "slot_bytes": shape.slot_bytes},
    )
    if meeting.listens:
        descriptors = [_make_memory(shape) for _ in range(2)]
        socket.send_fds(control, [b"r"], descriptors)
    else:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        descriptors.reverse()
    try:
        outgoing, incoming = (SharedRing(fd, shape, runtime) for fd in descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
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


def _listen(meeting: Meeting) -> socket.socket:
    name = f"hetero-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen()
        publish(meeting, "shm address", {"name": name})
        return accept(listener, meeting)[0]


def _call(meeting: Meeting) -> socket.socket:
    name = look_up(meeting, "shm address")["name"]
    return connect("\0" + name, meeting, family=socket.AF_UNIX)


def _make_memory(shape: RingShape) -> int:
    descriptor = os.memfd_create("hetero-ring", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _total_bytes(shape))
    return descriptor
