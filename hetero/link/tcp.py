"""Opening a link over TCP: the ends meet on each other's addresses; carriers join their rings."""

from __future__ import annotations

from contextlib import ExitStack

from hetero.device.device import Device
from hetero.link.carried_ends import host_memory, make_ends, side_of
from hetero.link.carrier import CarriedMemory, Carrier
from hetero.link.control import Control
from hetero.link.handshake import Rendezvous
from hetero.link.ring import CONTROL_BYTES
from hetero.link.ring_link import RingLink, agree
from hetero.link.tcp_connections import TcpPaths, name_of, open_connections, tune

_LONGEST_STALL = 5.0
"""Seconds without an answer after which a rail is given up while another is answered: the kernel
has sent what is missing about five times by then."""
_LONGEST_SILENCE = 30.0
"""Seconds without any answer after which a connection ends, whatever others do: longer than a
switch takes to restart, or a debugger to look, and shorter than to wait for a host that is dead."""


def open_tcp(
    rendezvous: Rendezvous,
    *,
    ring_bytes: int,
    chunk_bytes: int,
    device: Device,
    paths: TcpPaths,
) -> RingLink:
    """Open one link. Collective between the two ends, which agree on all but their addresses.

    Args:
        ring_bytes: of one direction.
        chunk_bytes: the largest part of a message that is handed over at once.
        paths: this side's addresses. The listener says how many connections there are.
    """
    with ExitStack() as stack:
        connections = open_connections(rendezvous, paths, stack)
        connection = connections.control[0]
        agree(
            connection,
            rendezvous,
            transport="tcp",
            ring_bytes=ring_bytes,
            chunk_bytes=chunk_bytes,
            device=device,
        )
        memory = _make_memory(ring_bytes, device, stack)
        stall_seconds = min(rendezvous.description.timeout / 4, _LONGEST_STALL)
        silence = min(rendezvous.description.timeout, _LONGEST_SILENCE)
        carrier = Carrier(memory, side=side_of(rendezvous), stall_seconds=stall_seconds)
        stack.callback(carrier.close)
        carrier.follow(device)
        names = [name_of(connection) for connection in connections.rails]
        for connection in connections.rails:
            tune(connection, lost_after=silence)
            carrier.add_tcp_rail(connection)
        carrier.start()
        ends = make_ends(
            rendezvous,
            memory,
            carrier,
            Control(*connections.control, lost_after=silence),
            transport="tcp",
            rails=names,
            stack=stack,
        )
    return RingLink(
        rendezvous.description,
        transport="tcp",
        ends=ends,
        device=device,
        chunk_bytes=chunk_bytes,
    )


def _make_memory(ring_bytes: int, device: Device, stack: ExitStack) -> CarriedMemory:
    control, control_on_device = host_memory(CONTROL_BYTES, device, stack)
    rings, rings_on_device = host_memory(2 * ring_bytes, device, stack)
    return CarriedMemory(
        control,
        control_on_device,
        rings.address,
        rings_on_device,
        ring_bytes=ring_bytes,
        checksum_bytes=device.checksum_bytes,
        zero_copy=device.has_host_tensors and not device.checksum_bytes,
    )
