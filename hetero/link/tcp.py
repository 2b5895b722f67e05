"""Opening a link over TCP: the ends meet on each other's addresses; carriers join their rings."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import dataclass

from hetero.addresses import family_of
from hetero.device.ordered import OrderedDevice
from hetero.link.carried_ends import (
    CarriedMemory,
    control_memory,
    host_memory,
    make_ends,
    side_of,
)
from hetero.link.carrier import Carrier, RingMemory
from hetero.link.control import Control
from hetero.link.handshake import Meeting, accept, compare, connect, listen_at, look_up, publish
from hetero.link.header import PROTOCOL_VERSION
from hetero.link.ring_link import OrderedLink
from hetero.link.tcp_connections import TcpPaths, name_of, tune
from hetero.native.library import native

_LONGEST_STALL = 5.0
"""Seconds without an answer after which a rail is given up while another is answered: the kernel
has sent what is missing about five times by then."""
_LONGEST_SILENCE = 30.0
"""Seconds without any answer after which a connection ends, whatever others do: longer than a
switch takes to restart, or a debugger to look, and shorter than to wait for a host that is dead."""


@dataclass(frozen=True)
class _Connections:
    """Two for each path beside the rails: what the ends tell each other survives any of them."""

    control: list[socket.socket]
    rails: list[socket.socket]


def open_tcp(
    meeting: Meeting,
    *,
    ring_bytes: int,
    chunk_bytes: int,
    device: OrderedDevice,
    paths: TcpPaths,
) -> OrderedLink:
    """Open one link. Collective between the two ends, which agree on all but their addresses.

    Args:
        ring_bytes: of one direction.
        chunk_bytes: the largest part of a message that is handed over at once.
        paths: this side's addresses. The listener says how many connections there are.
    """
    with ExitStack() as stack:
        connections = _open_connections(meeting, paths, stack)
        agreed = {
            "protocol": PROTOCOL_VERSION,
            "ring_bytes": ring_bytes,
            "chunk_bytes": chunk_bytes,
            "checksum_bytes": device.checksum_bytes,
        }
        compare(connections.control[0], meeting, agreed)
        memory = _make_memory(ring_bytes, device, stack)
        stall_seconds = min(meeting.description.timeout / 4, _LONGEST_STALL)
        silence = min(meeting.description.timeout, _LONGEST_SILENCE)
        carrier = Carrier(
            native(),
            memory.for_carrier,
            side=side_of(meeting),
            stall_seconds=stall_seconds,
        )
        stack.callback(carrier.close)
        carrier.follow(device)
        names = [name_of(connection) for connection in connections.rails]
        for connection in connections.rails:
            tune(connection, lost_after=silence)
            carrier.add_tcp_rail(connection)
        carrier.start()
        ends = make_ends(
            meeting,
            memory,
            carrier,
            Control(*connections.control, lost_after=silence),
            transport="tcp",
            rails=names,
            stack=stack,
        )
    return OrderedLink(
        meeting.description,
        transport="tcp",
        ends=ends,
        device=device,
        chunk_bytes=chunk_bytes,
    )


def _make_memory(ring_bytes: int, device: OrderedDevice, stack: ExitStack) -> CarriedMemory:
    control, control_on_device = control_memory(device, stack)
    rings, rings_on_device = host_memory(2 * ring_bytes, device, stack)
    for_carrier = RingMemory(
        rings=rings.address,
        ring_bytes=ring_bytes,
        control=control.address,
        reads_back=False,
        checksum_bytes=device.checksum_bytes,
    )
    return CarriedMemory(control, control_on_device, rings_on_device, for_carrier)


def _open_connections(meeting: Meeting, paths: TcpPaths, stack: ExitStack) -> _Connections:
    opened = _listen(meeting, paths, stack) if meeting.listens else _call(meeting, paths, stack)
    for connection in opened.control:
        connection.settimeout(meeting.timeout)
    for connection in opened.rails:
        connection.settimeout(None)
    return opened


def _listen(meeting: Meeting, paths: TcpPaths, stack: ExitStack) -> _Connections:
    with ExitStack() as listening:
        listeners = [listening.enter_context(listen_at(address)) for address in paths.addresses]
        publish(
            meeting,
            "tcp addresses",
            {
                "addresses": [list(listener.getsockname()[:2]) for listener in listeners],
                "connections": paths.connections,
            },
        )
        control = [stack.enter_context(accept(one, meeting)[0]) for one in listeners]
        rails = [
            stack.enter_context(accept(listeners[index % len(listeners)], meeting)[0])
            for index in range(max(paths.connections, len(listeners)))
        ]
    return _Connections(control, rails)


def _call(meeting: Meeting, paths: TcpPaths, stack: ExitStack) -> _Connections:
    told = look_up(meeting, "tcp addresses")
    addresses = [(str(host), int(port)) for host, port in told["addresses"]]

    def call(index: int) -> socket.socket:
        return stack.enter_context(
            connect(
                addresses[index % len(addresses)],
                meeting,
                family=family_of(addresses[index % len(addresses)][0]),
                source=(paths.address_of(index), 0),
            )
        )

    control = [call(index) for index in range(len(addresses))]
    rails = [call(index) for index in range(max(int(told["connections"]), len(addresses)))]
    return _Connections(control, rails)
