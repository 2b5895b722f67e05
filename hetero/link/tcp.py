"""Opens a link over TCP: connections between the ends' addresses, whose rings carriers connect."""

from __future__ import annotations

from contextlib import ExitStack

from hetero.link.carried_ends import host_memory, make_ends, side_of
from hetero.link.carrier import Carrier, RingMemory
from hetero.link.control import Control
from hetero.link.handshake import Rendezvous
from hetero.link.ring import CONTROL_BYTES
from hetero.link.ring_link import RingLink
from hetero.link.ring_options import RingOptions
from hetero.link.tcp_connections import TcpPaths, open_connections, rail_name, tune

_MAX_STALL_SECONDS = 5.0
"""Seconds without an acknowledgement after which a rail is lost while another is acknowledged. The
kernel has retransmitted about five times by then."""
_MAX_ACK_SECONDS = 30.0
"""Seconds without an acknowledgement that end a connection, whatever other rails do. Longer than a
switch takes to restart; shorter than one waits for a dead host."""


def open_tcp(rendezvous: Rendezvous, options: RingOptions, paths: TcpPaths) -> RingLink:
    """Open one link. Collective between the two ends.

    `paths` are this end's addresses; the listener's also say the number of connections.
    """
    with ExitStack() as stack:
        connections = open_connections(rendezvous, paths, stack)
        options.agree(connections.control[0], rendezvous)
        memory = _make_memory(options, stack)
        stall_seconds = min(rendezvous.description.timeout / 4, _MAX_STALL_SECONDS)
        silence = min(rendezvous.description.timeout, _MAX_ACK_SECONDS)
        carrier = Carrier(memory, side=side_of(rendezvous), stall_seconds=stall_seconds)
        stack.callback(carrier.close)
        carrier.connect_device(options.device)
        names = [rail_name(connection) for connection in connections.rails]
        for connection in connections.rails:
            tune(connection, ack_timeout=silence)
            carrier.add_tcp_rail(connection)
        carrier.start()
        ends = make_ends(
            rendezvous,
            memory,
            carrier,
            Control(*connections.control, ack_timeout=silence),
            transport=options.transport,
            rails=names,
            stack=stack,
        )
    return RingLink(rendezvous.description, options, ends)


def _make_memory(options: RingOptions, stack: ExitStack) -> RingMemory:
    ring_bytes, device = options.ring_bytes, options.device
    control, control_on_device = host_memory(CONTROL_BYTES, device, stack)
    rings, rings_on_device = host_memory(2 * ring_bytes, device, stack)
    return RingMemory(
        control,
        control_on_device,
        rings.address,
        rings_on_device,
        ring_bytes=ring_bytes,
        checksum_bytes=device.checksum_bytes,
        zero_copy=device.has_host_tensors and not device.checksum_bytes,
    )
