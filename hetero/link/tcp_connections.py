"""The addresses that a TCP link uses, and what is asked of the kernel for its connections."""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from hetero.addresses import family_of, interface_with
from hetero.link.handshake import Rendezvous, accept, connect, listen_at, look_up, publish

# Within a host there is no delay to fill with data, and what is sent is best received while it is
# still in a core's cache.
_BUFFER_WITHIN_HOST = 256 << 10
_TCP_NOTSENT_LOWAT = 25
_UNSENT_BYTES = 128 << 10
_LATER_SECONDS = 2.5
"""What a rail is given to answer once another has: the kernel has asked again by then."""

_log = logging.getLogger(__name__)


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
        reached = look_up(rendezvous, "reached")["reached"]
        _tell_unreached(rendezvous, paths.addresses, reached)
        listeners = [listeners[index] for index in reached]
        control = [stack.enter_context(accept(one, rendezvous)) for one in listeners]
        rails = [
            stack.enter_context(accept(listeners[index % len(listeners)], rendezvous))
            for index in range(_rails(paths.connections, listeners))
        ]
    return Connections(control, rails)


def _call(rendezvous: Rendezvous, paths: TcpPaths, stack: ExitStack) -> Connections:
    told = look_up(rendezvous, "addresses")
    addresses = [(str(host), int(port)) for host, port in told["addresses"]]
    # Where none answers, all are tried until the deadline, and the error says what is wrong.
    reached = _answering(addresses, paths, rendezvous.timeout) or list(range(len(addresses)))
    publish(rendezvous, "reached", {"reached": reached})
    _tell_unreached(rendezvous, [host for host, _ in addresses], reached)

    def call(number: int) -> socket.socket:
        index = reached[number % len(reached)]
        # Rails may share an address; each of this side's is used in its turn all the same.
        source = paths.address_of(index + number // len(reached) * len(addresses))
        return stack.enter_context(
            connect(
                addresses[index],
                rendezvous,
                family=family_of(addresses[index][0]),
                source=(source, 0),
            )
        )

    control = [call(number) for number in range(len(reached))]
    rails = [call(number) for number in range(_rails(int(told["connections"]), reached))]
    return Connections(control, rails)


def _answering(addresses: Sequence[tuple[str, int]], paths: TcpPaths, timeout: float) -> list[int]:
    """Which addresses take a connection from the local address that goes with them.

    A rail that has been lost takes none, and the link is to go on over the others. The connections
    are closed again: what they would be for has not been proved yet.
    """
    answering: list[int] = []
    with selectors.DefaultSelector() as selector, ExitStack() as opened:
        for index, address in enumerate(addresses):
            connection = opened.enter_context(
                socket.socket(family_of(address[0]), socket.SOCK_STREAM)
            )
            connection.setblocking(False)
            with suppress(OSError):
                connection.bind((paths.address_of(index), 0))
                if connection.connect_ex(address) in (0, errno.EINPROGRESS):
                    selector.register(connection, selectors.EVENT_WRITE, index)
        deadline = time.monotonic() + timeout
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(key.fileobj)
                refused = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                if not refused:
                    answering.append(key.data)
                    deadline = min(deadline, time.monotonic() + _LATER_SECONDS)
    return sorted(answering)


def _tell_unreached(
    rendezvous: Rendezvous, addresses: Sequence[str], reached: Sequence[int]
) -> None:
    unreached = [address for index, address in enumerate(addresses) if index not in reached]
    if unreached:
        _log.warning(
            "%s over tcp: nothing answers between the hosts at %s; it goes on over %d of %d rails",
            rendezvous.description,
            ", ".join(unreached),
            len(reached),
            len(addresses),
        )


def _rails(connections: int, addresses: Sequence[object]) -> int:
    """How many rails there are: each address has one at least, where there are any."""
    return max(connections, len(addresses)) if connections else 0
