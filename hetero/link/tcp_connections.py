"""The addresses that a TCP link uses, and what is asked of the kernel for its connections."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from hetero.addresses import family_of, interface_with
from hetero.link.handshake import Rendezvous, accept, connect, listen_at, look_up, publish

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
    """0 for none but those that the ends talk over."""

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


@dataclass(frozen=True)
class Connections:
    """One for each address beside the rails: what the ends tell each other survives any of them."""

    control: list[socket.socket]
    rails: list[socket.socket]


def open_connections(rendezvous: Rendezvous, paths: TcpPaths, stack: ExitStack) -> Connections:
    """Connect the two ends, each of which has proved itself to the other."""
    opened = (
        _listen(rendezvous, paths, stack) if rendezvous.listens else _call(rendezvous, paths, stack)
    )
    for connection in opened.control:
        connection.settimeout(rendezvous.timeout)
    for connection in opened.rails:
        connection.settimeout(None)
    return opened


def _listen(rendezvous: Rendezvous, paths: TcpPaths, stack: ExitStack) -> Connections:
    with ExitStack() as listening:
        listeners = [listening.enter_context(listen_at(address)) for address in paths.addresses]
        publish(
            rendezvous,
            "addresses",
            {
                "addresses": [list(listener.getsockname()[:2]) for listener in listeners],
                "connections": paths.connections,
            },
        )
        control = [stack.enter_context(accept(one, rendezvous)[0]) for one in listeners]
        rails = [
            stack.enter_context(accept(listeners[index % len(listeners)], rendezvous)[0])
            for index in range(_rails(paths.connections, listeners))
        ]
    return Connections(control, rails)


def _call(rendezvous: Rendezvous, paths: TcpPaths, stack: ExitStack) -> Connections:
    told = look_up(rendezvous, "addresses")
    addresses = [(str(host), int(port)) for host, port in told["addresses"]]

    def call(index: int) -> socket.socket:
        return stack.enter_context(
            connect(
                addresses[index % len(addresses)],
                rendezvous,
                family=family_of(addresses[index % len(addresses)][0]),
                source=(paths.address_of(index), 0),
            )
        )

    control = [call(index) for index in range(len(addresses))]
    rails = [call(index) for index in range(_rails(int(told["connections"]), addresses))]
    return Connections(control, rails)


def _rails(connections: int, addresses: Sequence[object]) -> int:
    """How many rails there are: each address has one at least, where there are any."""
    return max(connections, len(addresses)) if connections else 0
