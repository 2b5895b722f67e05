"""Opening a link over TCP: each connection is a rail that carries the ring of two devices."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass

from hetero.device.host import HostDevice
from hetero.device.ordered import OrderedDevice
from hetero.native.library import LIBRARY
from hetero.transport.carried_ends import LocalEnd, RemoteEnd
from hetero.transport.carrier import Carrier, RingMemory
from hetero.transport.control import Control
from hetero.transport.failover import Watch
from hetero.transport.handshake import Meeting, accept, compare, connect, look_up, publish
from hetero.transport.header import PROTOCOL_VERSION
from hetero.transport.ordered.link import OrderedLink
from hetero.transport.ordered.ring import CONTROL_BYTES, Direction
from hetero.transport.ordered.transfer import OrderedEnds
from hetero.transport.same_host import SharedMemory, make_memory
from hetero.transport.tcp.connections import TcpPaths, tune

_CREDIT_SECONDS = 5.0
_LONGEST_STALL = 5.0


@dataclass(frozen=True)
class _Memory:
    memory: SharedMemory
    on_device: int


def open_tcp_rails(
    meeting: Meeting,
    *,
    ring_bytes: int,
    chunk_bytes: int,
    device: OrderedDevice,
    paths: TcpPaths,
) -> OrderedLink:
    """Open one link. Collective between the two ends.

    Args:
        ring_bytes: of one direction.
        chunk_bytes: the largest part of a message that is handed over at once.
        paths: this side's addresses. The listener says how many connections there are.
    """
    with ExitStack() as stack:
        control, rails = _open_connections(meeting, paths, stack)
        agreed = {
            "protocol": PROTOCOL_VERSION,
            "ring_bytes": ring_bytes,
            "chunk_bytes": chunk_bytes,
        }
        compare(control, meeting, agreed)
        words = _host_memory(CONTROL_BYTES, device, stack)
        rings = _host_memory(2 * ring_bytes, device, stack)
        stall = min(meeting.description.timeout / 2, _LONGEST_STALL)
        carrier = _make_carrier(meeting, words, rings, ring_bytes, rails, stall, device, stack)
        ends = _make_ends(meeting, carrier, control, words, rings, ring_bytes, rails, stack)
    return OrderedLink(
        meeting.description,
        transport="tcp",
        ends=ends,
        device=device,
        chunk_bytes=chunk_bytes,
    )


def _make_carrier(meeting, words, rings, ring_bytes, rails, stall, device, stack):  # type: ignore
    memory = RingMemory(
        rings=rings.memory.address,
        ring_bytes=ring_bytes,
        control=words.memory.address,
        reads_back=False,
        words_notify=isinstance(device, HostDevice),
    )
    side = 0 if meeting.listens else 1
    carrier = Carrier(LIBRARY.load(), memory, side=side, stall_seconds=stall)
    stack.callback(carrier.close)
    device.notify(*carrier.progress_call)
    for _, connection in rails:
        tune(connection, stall_seconds=stall)
        carrier.add_tcp_rail(connection)
    carrier.start()
    return carrier


def _make_ends(meeting, carrier, control, words, rings, ring_bytes, rails, stack):  # type: ignore
    side = 0 if meeting.listens else 1
    description = meeting.description
    remote = RemoteEnd(words.memory, 1 - side, carrier.wake)
    watch = Watch(
        carrier,
        Control(control),
        rails=[name for name, _ in rails],
        peer_state=remote,
        name=f"tcp {description.rank}-{description.peer}",
        peer=description.peer,
    )
    stack.callback(watch.close)
    local = LocalEnd(words.memory, side, watch.tell_fault)
    stack.callback(_settle, carrier, watch, local, remote)
    return OrderedEnds(
        outgoing=Direction(words.memory, side, words.on_device),
        incoming=Direction(words.memory, 1 - side, words.on_device),
        mine=local,
        theirs=remote,
        outgoing_ring=rings.on_device,
        incoming_ring=rings.on_device + ring_bytes,
        ring_bytes=ring_bytes,
        peer_has_gone=watch.peer_has_gone,
        close=stack.pop_all().close,
    )


def _settle(carrier: Carrier, watch: Watch, local: LocalEnd, remote: RemoteEnd) -> None:
    """The peer must hear what was consumed here before this end is gone."""
    if not (local.has_failed or remote.has_failed) and not watch.peer_has_gone():
        carrier.settle_credits(_CREDIT_SECONDS)


def _host_memory(nbytes: int, device: OrderedDevice, stack: ExitStack) -> _Memory:
    descriptor = make_memory(nbytes)
    try:
        memory = SharedMemory(descriptor, nbytes)
    finally:
        os.close(descriptor)
    stack.callback(memory.close)
    address = device.register(memory.address, nbytes)
    stack.callback(device.unregister, memory.address)
    return _Memory(memory, address)


def _open_connections(
    meeting: Meeting, paths: TcpPaths, stack: ExitStack
) -> tuple[socket.socket, list[tuple[str, socket.socket]]]:
    """The connection beside the rails, and the rails with their names."""
    opened = _listen(meeting, paths, stack) if meeting.listens else _call(meeting, paths, stack)
    for connection in opened:
        connection.settimeout(None)
    opened[0].settimeout(meeting.timeout)
    return opened[0], [
        (f"{one.getsockname()[0]} to {one.getpeername()[0]}", one) for one in opened[1:]
    ]


def _listen(meeting: Meeting, paths: TcpPaths, stack: ExitStack) -> list[socket.socket]:
    with ExitStack() as listening:
        listeners = [
            listening.enter_context(socket.create_server((address, 0), backlog=32))
            for address in paths.addresses
        ]
        publish(
            meeting,
            "tcp addresses",
            {
                "addresses": [list(listener.getsockname()) for listener in listeners],
                "connections": paths.connections,
            },
        )
        return [
            stack.enter_context(accept(listeners[index % len(listeners)], meeting)[0])
            for index in _numbers(paths.connections)
        ]


def _call(meeting: Meeting, paths: TcpPaths, stack: ExitStack) -> list[socket.socket]:
    told = look_up(meeting, "tcp addresses")
    addresses = [(str(host), int(port)) for host, port in told["addresses"]]
    return [
        stack.enter_context(
            connect(
                addresses[index % len(addresses)],
                meeting,
                family=socket.AF_INET,
                source=(paths.address_of(index), 0),
            )
        )
        for index in _numbers(int(told["connections"]))
    ]


def _numbers(connections: int) -> list[int]:
    """Which address each connection uses: that beside the rails the first, then the rails."""
    return [0, *range(connections)]
