"""The connections of a TCP link: how they are opened, and what is asked of the kernel for them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import psutil

from hetero.transport.chunked import RingShape
from hetero.transport.handshake import Meeting, accept, compare, connect, look_up, publish
from hetero.transport.header import PROTOCOL_VERSION

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


def open_connections(
    meeting: Meeting, *, shape: RingShape, paths: TcpPaths
) -> tuple[list[socket.socket], list[socket.socket]]:
    """Outgoing and incoming connections, blocking, between two ends that agree on their chunks.

    Raises LinkError, and leaves no connection open, when the ends do not meet or differ.
    """
    ours = {"protocol": PROTOCOL_VERSION, "slots": shape.slots, "slot_bytes": shape.slot_bytes}
    with ExitStack() as opened:
        both = _listen(meeting, paths, opened) if meeting.listens else _call(meeting, paths, opened)
        both[0].settimeout(meeting.timeout)
        try:
            compare(both[0], meeting, ours)
        except OSError as error:
            raise meeting.failure(
                f"rank {meeting.description.peer} ended the opening ({error})", "see its log"
            ) from error
        for connection in both:
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _size_buffers(connection)
        opened.pop_all()
    half = len(both) // 2
    outgoing, incoming = both[:half], both[half:]
    return (outgoing, incoming) if meeting.listens else (incoming, outgoing)


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


def tune(connection: socket.socket, *, stall_seconds: float) -> None:
    """Send at once, keep little unsent in the kernel, and give up where nothing is confirmed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    connection.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(stall_seconds * 1000))
    )
    _size_buffers(connection)


def _listen(meeting: Meeting, paths: TcpPaths, opened: ExitStack) -> list[socket.socket]:
    listeners = []
    try:
        for address in paths.addresses:
            listener = socket.create_server((address, 0), backlog=2 * paths.connections)
            listeners.append(listener)
        publish(
            meeting,
            "tcp addresses",
            {
                "addresses": [list(listener.getsockname()) for listener in listeners],
                "connections": paths.connections,
            },
        )
        return [
            opened.enter_context(accept(listeners[index % len(listeners)], meeting)[0])
            for index in range(2 * paths.connections)
        ]
    finally:
        for listener in listeners:
            listener.close()


def _call(meeting: Meeting, paths: TcpPaths, opened: ExitStack) -> list[socket.socket]:
    told = look_up(meeting, "tcp addresses")
    addresses: Sequence[tuple[str, int]] = [
        (str(host), int(port)) for host, port in told["addresses"]
    ]
    return [
        opened.enter_context(
            connect(
                addresses[index % len(addresses)],
                meeting,
                family=socket.AF_INET,
                source=(paths.address_of(index), 0),
            )
        )
        for index in range(2 * int(told["connections"]))
    ]
