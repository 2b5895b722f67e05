"""Opens a link over TCP: connections between the ends' addresses, whose rings carriers connect."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack

from hetero.link.carried_ends import host_rings, make_ends
from hetero.link.carrier import Carrier
from hetero.link.control import Control
from hetero.link.handshake import Rendezvous
from hetero.link.ring_link import RingLink
from hetero.link.ring_options import RingOptions
from hetero.link.tcp_connections import open_connections, rail_name, tune

_MAX_STALL_SECONDS = 5.0
"""Seconds without an acknowledgement after which a rail is lost while another is acknowledged. The
kernel has retransmitted about five times by then."""
_MAX_ACK_SECONDS = 30.0
"""Seconds without an acknowledgement that end a control connection, and a rail whatever others do
(watchdog.c). Longer than a switch takes to restart; shorter than one waits for a dead host."""


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
        ends = make_ends(rendezvous, options, memory, carrier, control, rails=names, stack=stack)
    link = RingLink(rendezvous.description, options, ends)
    link.cut_rail = lambda index: connections.rails[index].shutdown(socket.SHUT_RDWR)
    return link
