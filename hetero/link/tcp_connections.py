"""The addresses that a TCP link uses, and what is asked of the kernel for its connections."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import psutil

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


def interface_address(name: str) -> str | None:
    """The IPv4 address of a network interface; None where it has none or does not exist."""
    for entry in psutil.net_if_addrs().get(name, []):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    return None


def address_towards(host: str) -> str:
    """The local IPv4 address from which packets to a host leave."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _size_buffers(connection: socket.socket) -> None:
    """Small buffers within a host; between hosts the kernel's own, which grow with the delay."""
    ours = {
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    if connection.getpeername()[0] in ours:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_WITHIN_HOST)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_WITHIN_HOST)


def name_of(connection: socket.socket) -> str:
    """A connection in logs: the address at each of its ends."""
    return f"{connection.getsockname()[0]} to {connection.getpeername()[0]}"


def tune(connection: socket.socket, *, stall_seconds: float) -> None:
    """Send at once, keep little unsent in the kernel, and give up where nothing is confirmed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    connection.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(stall_seconds * 1000))
    )
    _size_buffers(connection)
