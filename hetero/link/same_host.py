"""Opens a link between two devices of one host whose streams order themselves."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from functools import partial

from hetero.device.device import Device, PeerMemory
from hetero.errors import LinkError
from hetero.link.flow import SMALL_BYTES, SMALL_BYTES_OF_DEVICE
from hetero.link.handshake import Rendezvous, receive_exactly, receive_json, send_json
from hetero.link.ring import CONTROL_BYTES, Direction, EndState
from hetero.link.ring_link import RingEnds, RingLink, agree
from hetero.link.shared_memory import SharedMemory, has_gone, join, share_memory


def open_same_host(
    rendezvous: Rendezvous,
    *,
    transport: str,
    ring_bytes: int,
    chunk_bytes: int,
    device: Device,
) -> RingLink:
    """Open one link. Collective between the two ends, which must run on one host.

    Args:
        transport: `shm`, where the data lie in host memory that both devices have pinned between
            the two, or `ipc`: in device memory of the sender that the receiver's device reads.
        ring_bytes: of one direction.
        chunk_bytes: the largest part of a message that is handed over at once.
    """
    with ExitStack() as held:
        control = held.enter_context(join(rendezvous))
        agree(
            control,
            rendezvous,
            transport=transport,
            ring_bytes=ring_bytes,
            chunk_bytes=chunk_bytes,
            device=device,
        )
        sizes = (CONTROL_BYTES, ring_bytes, ring_bytes) if transport == "shm" else (CONTROL_BYTES,)
        segments = share_memory(control, rendezvous, sizes=sizes)
        addresses = [_map(held, device, segment) for segment in segments]
        number = 0 if rendezvous.listens else 1
        if transport == "shm":
            outgoing_ring, incoming_ring = addresses[1 + number], addresses[2 - number]
        else:
            outgoing_ring, incoming_ring = _share_device_memory(held, control, device, ring_bytes)
        # Neither goes on before both have mapped everything.
        control.sendall(b"k")
        receive_exactly(control, 1)
        ends = RingEnds(
            outgoing=Direction(segments[0], number, addresses[0]),
            incoming=Direction(segments[0], 1 - number, addresses[0]),
            mine=EndState(segments[0], number),
            theirs=EndState(segments[0], 1 - number),
            outgoing_ring=outgoing_ring,
            incoming_ring=incoming_ring,
            ring_bytes=ring_bytes,
            zero_copy=False,
            peer_has_gone=partial(has_gone, control),
            close=held.pop_all().close,
        )
    return RingLink(
        rendezvous.description,
        transport=transport,
        ends=ends,
        device=device,
        chunk_bytes=chunk_bytes,
        small_bytes=SMALL_BYTES_OF_DEVICE if transport == "ipc" else SMALL_BYTES,
    )


def _map(held: ExitStack, device: Device, segment: SharedMemory) -> int:
    held.callback(segment.close)
    address = device.register(segment.address, segment.nbytes)
    held.callback(device.unregister, segment.address)
    return address


def _share_device_memory(
    held: ExitStack, control: socket.socket, device: Device, nbytes: int
) -> tuple[int, int]:
    """This end's ring, which it fills, and the peer's, opened here."""
    if not isinstance(device, PeerMemory):
        raise LinkError("`ipc` is for GPUs whose streams wait on memory")
    mine, handle = device.allocate(nbytes)
    held.callback(device.free, mine)
    send_json(control, {"handle": handle.hex()})
    theirs = device.open(bytes.fromhex(receive_json(control)["handle"]))
    held.callback(device.close, theirs)
    return mine, theirs
