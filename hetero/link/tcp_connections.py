"""The addresses that a TCP link uses, and what is asked of the kernel for its connections."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from hetero.addresses import interface_with

# Within a host there is no delay to fill with data, and what is sent is best received while it is
# still in a core's cache.
_BUFFER_WITHIN_HOST = 256 << 10
_TCP_NOTSENT_LOWAT = 25
_UNSENT_BYTES = 128 << 10


@dataclass(frozen=True)
class TcpPaths:
    """The local addresses a link may use, one a network interface, and its connections."""

    addresses: tuple[str, ...]
    connections: int = 4

    def address_of(self, index: int) -> str:
        return self.addresses[index % len(self.addresses)]


def _size_buffers(connection: socket.socket) -> None:
    """Small buffers within a host; between hosts the kernel's own, which grow with the delay."""
    if interface_with(connection.getpeername()[0]) is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_WITHIN_HOST)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_WITHIN_HOST)


def name_of(connection: socket.socket) -> str:
    """A connection in logs: the address at each of its ends."""
    return f"{connection.getsockname()[0]} to {connection.getpeername()[0]}"


def tune(connection: socket.socket, *, lost_after: float) -> None:
    """Send at once, keep little unsent in the kernel, and give up where nothing is confirmed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    connection.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(lost_after * 1000))
    )
    _size_buffers(connection)
