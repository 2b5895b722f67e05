"""CPU forwarding between hosts: several TCP connections a direction, spread over the addresses.

A message is cut into chunks, and each connection has a thread of its own that takes the next one,
so a faster connection carries more of them and none waits for another. Tensors in host memory go
from their own memory to the wire and from the wire into their own memory (`in_place`); tensors of
a device go through a ring of pinned slots (`ring`). Both speak one wire protocol, so that either
may be at the other end.
"""

from __future__ import annotations

import torch

from hetero.device.choose import runtime_for
from hetero.transport.base import Link
from hetero.transport.chunked import ChunkedLink, RingShape
from hetero.transport.handshake import Meeting
from hetero.transport.tcp.connections import (
    TcpPaths,
    address_towards,
    interface_address,
    open_connections,
)
from hetero.transport.tcp.in_place import InPlaceLink
from hetero.transport.tcp.ring import LocalRing, TcpRecvEnd, TcpSendEnd

__all__ = ["TcpPaths", "address_towards", "interface_address", "open_tcp"]


def open_tcp(
    meeting: Meeting,
    *,
    shape: RingShape,
    paths: TcpPaths,
    device: torch.device,
    checksum: bool = False,
    in_place: bool | None = None,
) -> Link:
    """Open a link for the tensors of a device, `paths.connections` connections in each direction.

    Collective between the two ends. `in_place` is for tensors in host memory, and so the default
    there; it concerns this end alone.
    """
    outgoing, incoming = open_connections(meeting, shape=shape, paths=paths)
    if device.type == "cpu" if in_place is None else in_place:
        return InPlaceLink(
            meeting.description,
            outgoing=outgoing,
            incoming=incoming,
            chunk_bytes=shape.slot_bytes,
            checksum=checksum,
        )
    peer, name = meeting.description.peer, f"{meeting.description.rank}-{meeting.description.peer}"
    runtime = runtime_for(device)
    return ChunkedLink(
        meeting.description,
        transport="tcp",
        send_end=TcpSendEnd(outgoing, LocalRing(shape, runtime), peer, name),
        recv_end=TcpRecvEnd(incoming, LocalRing(shape, runtime), peer, name),
        device=device,
        checksum=checksum,
    )
