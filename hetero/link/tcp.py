"""Links over TCP, whose rails are connections between the addresses of the two ends."""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from hetero.errors import LinkError
from hetero.link.carrier import Carrier, host_rings, make_ends
from hetero.link.control import Control
from hetero.link.handshake import Rendezvous, accept, connect, listen_at, look_up, publish
from hetero.link.redial import Place, Redial, Route
from hetero.link.ring import RingOptions
from hetero.link.ring_link import RingLink
from hetero.startup.addresses import PORT_RANGE, family_of, interface_with, keep_alive
from hetero.startup.process import close_in_children

_MAX_STALL_SECONDS = 5.0
"""Seconds without an acknowledgement after which a rail is lost while another is acknowledged. The
kernel has retransmitted about five times by then."""
_MAX_ACK_SECONDS = 30.0
"""Seconds without an acknowledgement that end a control connection, and a rail whatever others do
(engine.c). Longer than a switch takes to restart; shorter than one waits for a dead host."""
_SLOWER_SECONDS = 2.5
"""The time for further addresses once one has answered: enough to retransmit a lost SYN."""
_PAUSE_SECONDS = 0.2
"""The pause between two attempts to reach any address."""
_BUFFER_WITHIN_HOST = 256 << 10
"""Socket buffers for a peer on this host: the latency is low, and data are received while they are
still in the cache."""
_TCP_NOTSENT_LOWAT = 25
_UNSENT_BYTES = 128 << 10

_log = logging.getLogger(__name__)


def open_tcp(
    rendezvous: Rendezvous, options: RingOptions, *, addresses: Sequence[str], rails: int
) -> RingLink:
    """Open one link. Collective between the two ends.

    `addresses` are this end's. The listener's number of `rails` counts, at least one an address.
    """
    with ExitStack() as stack:
        connections = open_connections(rendezvous, addresses, rails=rails, stack=stack)
        options.agree(connections.control[0], rendezvous)
        memory = host_rings(options, stack)
        stall_seconds = min(rendezvous.description.timeout / 4, _MAX_STALL_SECONDS)
        silence = min(rendezvous.description.timeout, _MAX_ACK_SECONDS)
        carrier = Carrier(memory, options, side=rendezvous.side, stall_seconds=stall_seconds)
        stack.callback(carrier.close)
        names = [rail_name(connection) for connection in connections.rails]
        for connection in connections.rails:
            tune(connection)
            carrier.add_tcp_rail(connection)
        carrier.start()
        control = Control(*connections.control, ack_timeout=silence)
        redial = Redial(
            rendezvous,
            patience=silence,
            tune=tune,
            listeners=connections.listeners,
            routes=connections.routes,
        )
        ends = make_ends(
            rendezvous,
            options,
            memory,
            carrier,
            control,
            rails=names,
            stack=stack,
            redial=redial,
        )
    link = RingLink(rendezvous.description, options, ends)
    link.cut_rail = carrier.cut_tcp_rail
    return link


def rail_name(connection: socket.socket) -> str:
    """The name of a connection in logs: the address at each of its ends."""
    return f"{connection.getsockname()[0]} to {connection.getpeername()[0]}"


def tune(connection: socket.socket) -> None:
    """Disable Nagle's delay, and keep little unsent data in the kernel.

    Small buffers within a host; between hosts the kernel tunes them. Never TCP_USER_TIMEOUT: the
    kernel then also ends a connection whose peer is stopped, although the peer's kernel answers.
    Keepalive, or firewalls forget an idle rail.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    keep_alive(connection)
    if interface_with(connection.getpeername()[0]) is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_WITHIN_HOST)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_WITHIN_HOST)


@dataclass(frozen=True)
class Connections:
    """A control connection for each address, so that losing one leaves another, and the rails."""

    control: list[socket.socket]
    rails: list[socket.socket]
    listeners: list[socket.socket]
    """Where the listener can be dialed again; of the caller, none."""
    routes: dict[Place, Route]
    """By which the caller opened each; of the listener, none."""


def open_connections(
    rendezvous: Rendezvous, addresses: Sequence[str], *, rails: int, stack: ExitStack
) -> Connections:
    """Connect the two ends, authenticated both ways.

    `addresses` are this end's, one a network interface. The listener's `rails` counts: 0 for
    control connections only, else at least one for each address.
    """
    if rendezvous.listens:
        opened = _listen(rendezvous, addresses, rails, stack)
    else:
        opened = _connect(rendezvous, addresses, stack)
    for connection in opened.control:
        connection.settimeout(rendezvous.timeout)
    for connection in opened.rails:
        connection.settimeout(None)
    return opened


def _listen(
    rendezvous: Rendezvous, addresses: Sequence[str], rails: int, stack: ExitStack
) -> Connections:
    with ExitStack() as listening:
        listeners = [
            listening.enter_context(close_in_children(listen_at(address))) for address in addresses
        ]
        publish(
            rendezvous,
            "addresses",
            {
                "addresses": [list(listener.getsockname()[:2]) for listener in listeners],
                "connections": rails,
            },
        )
        # The caller tries until its own deadline, and then says why it reached nothing.
        patient = replace(rendezvous, timeout=rendezvous.timeout + _SLOWER_SECONDS)
        answer = look_up(patient, "reached")
        reached = answer["reached"]
        if not reached:
            raise _no_path(rendezvous, f"rank {rendezvous.description.peer} says: {answer['why']}")
        _warn_unreachable(rendezvous, addresses, reached)
        listeners = [listeners[index] for index in reached]
        opened = Connections(
            [stack.enter_context(accept(one, rendezvous)) for one in listeners],
            [
                stack.enter_context(accept(listeners[index % len(listeners)], rendezvous))
                for index in range(_rail_count(rails, listeners))
            ],
            listeners if rails else [],
            {},
        )
        if rails:
            stack.enter_context(listening.pop_all())
        return opened


def _connect(rendezvous: Rendezvous, own: Sequence[str], stack: ExitStack) -> Connections:
    remote = look_up(rendezvous, "addresses")
    addresses = [(str(host), int(port)) for host, port in remote["addresses"]]
    reached, why = _reachable(addresses, own, rendezvous.timeout)
    publish(rendezvous, "reached", {"reached": reached, "why": why})
    if not reached:
        raise _no_path(rendezvous, why)
    _warn_unreachable(rendezvous, [host for host, _ in addresses], reached)

    routes: dict[Place, Route] = {}

    def open_one(kind: str, number: int) -> socket.socket:
        index = reached[number % len(reached)]
        # Rails may share a remote address; still use each local address in turn.
        source = own[(index + number // len(reached) * len(addresses)) % len(own)]
        routes[Place(kind, number)] = Route(source, addresses[index])
        return stack.enter_context(
            connect(
                addresses[index],
                rendezvous,
                family=family_of(addresses[index][0]),
                source=(source, 0),
            )
        )

    count = _rail_count(int(remote["connections"]), reached)
    control = [open_one("control", number) for number in range(len(reached))]
    rails = [open_one("rail", number) for number in range(count)]
    return Connections(control, rails, [], routes)


def _reachable(
    addresses: Sequence[tuple[str, int]], own: Sequence[str], timeout: float
) -> tuple[list[int], str]:
    """The indices of the addresses that answer their local counterpart, and why the others do not.

    An address that is down is left out, and the link uses the others. If none answers, all are
    tried again until the timeout.
    """
    deadline = time.monotonic() + timeout
    failures: dict[int, str] = {}
    while True:
        answering, last = _try_each(addresses, own, deadline)
        failures |= last  # a failure per address: one attempt may not reach all
        if answering or time.monotonic() + _PAUSE_SECONDS > deadline:
            break
        time.sleep(_PAUSE_SECONDS)
    reasons = []
    for index, (host, port) in enumerate(addresses):
        source, failure = own[index % len(own)], failures.get(index, "no answer")
        if source == host:
            failure += ", and that is an address of this host itself"
        if index not in answering:
            reasons.append(f"{host}:{port} from {source}: {failure}")
    return answering, f"{socket.gethostname()} cannot reach {'; '.join(reasons)}" if reasons else ""


def _try_each(
    addresses: Sequence[tuple[str, int]], own: Sequence[str], deadline: float
) -> tuple[list[int], dict[int, str]]:
    """The indices of the addresses that accept a connection, and errors by the others' indices.

    The connections are closed again; the real ones are authenticated.
    """
    answering: list[int] = []
    failures: dict[int, str] = {}
    with selectors.DefaultSelector() as selector, ExitStack() as opened:
        for index, address in enumerate(addresses):
            connection = opened.enter_context(
                socket.socket(family_of(address[0]), socket.SOCK_STREAM)
            )
            connection.setblocking(False)
            try:
                connection.bind((own[index % len(own)], 0))
                code = connection.connect_ex(address)
            except OSError as error:
                code = error.errno or 0
            if code in (0, errno.EINPROGRESS):
                selector.register(connection, selectors.EVENT_WRITE, index)
            else:
                failures[index] = os.strerror(code)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(key.fileobj)
                refused = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                if refused:
                    failures[key.data] = os.strerror(refused)
                    continue
                answering.append(key.data)
                deadline = min(deadline, time.monotonic() + _SLOWER_SECONDS)
    return sorted(answering), failures


def _no_path(rendezvous: Rendezvous, why: str) -> LinkError:
    return rendezvous.failure(
        why,
        f"open the ports between the hosts ({PORT_RANGE}), or name NICs that lead to each other "
        "(--hetero-nics)",
    )


def _warn_unreachable(
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


def _rail_count(connections: int, addresses: Sequence[object]) -> int:
    """The number of rails: if there are any, at least one for each address."""
    return max(connections, len(addresses)) if connections else 0
