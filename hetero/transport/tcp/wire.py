"""What goes over each connection of a TCP link: frames one way, at most one refusal the other.

A frame is a chunk: its number in the direction, the header of its message, its offset there, its
size and checksum, and then its bytes. The numbers on one connection only grow.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from hetero.transport.header import HEADER_BYTES

_PREFIX = struct.Struct(f"<Q{HEADER_BYTES}sQQI")
_REFUSAL_BYTES = 512


class Frame(NamedTuple):
    """What a connection carries in front of a chunk's bytes."""

    number: int
    header: bytes
    offset: int
    nbytes: int
    checksum: int

    def pack(self) -> bytes:
        return _PREFIX.pack(*self)


def receive_frame(connection: socket.socket) -> Frame | None:
    """The next frame, without its bytes; None at the end of the stream."""
    prefix = bytearray(_PREFIX.size)
    count = connection.recv_into(prefix, 0, socket.MSG_WAITALL)
    if count == 0:
        return None
    receive_into(connection, memoryview(prefix)[count:])
    return Frame(*_PREFIX.unpack(prefix))


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer from a blocking connection, in one call to the kernel where it will."""
    done = 0
    while done < len(buffer):
        count = connection.recv_into(buffer[done:], 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError("end of stream in the middle of a chunk")
        done += count


def refuse(connection: socket.socket, reason: str) -> None:
    """Tell the sender why nothing more is taken."""
    try:
        connection.sendall(reason.encode()[:_REFUSAL_BYTES])
    except OSError:  # the sender has gone already
        return


class Backchannel:
    """How a sender hears of a refusal, or of the receiver's end. Used by one thread."""

    def __init__(self, connections: Sequence[socket.socket], peer: int) -> None:
        self._peer = peer
        self._connections = {connection.fileno(): connection for connection in connections}
        self._poller = select.poll()
        for descriptor in self._connections:
            self._poller.register(descriptor, select.POLLIN)

    def check(self) -> None:
        """Never blocks. Raises ConnectionError with what there is to hear."""
        texts = [self._read(descriptor) for descriptor, _ in self._poller.poll(0)]
        if texts:
            # A refusal says more than the end of a connection.
            raise ConnectionError(max(texts) or f"rank {self._peer} has ended or closed the link")

    def _read(self, descriptor: int) -> str:
        try:
            # Left there for the other threads that look.
            data = self._connections[descriptor].recv(
                _REFUSAL_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT
            )
        except OSError:
            return ""
        return data.decode(errors="replace")
