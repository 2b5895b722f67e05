"""Opens a link between two devices of one host (`shm`, `ipc`)."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from functools import partial

from hetero.device.device import Device
from hetero.link.handshake import Rendezvous, has_ended, receive_exactly, receive_json, send_json
from hetero.link.ring import CONTROL_BYTES, Direction, EndState
from hetero.link.ring_link import RingLink
from hetero.link.ring_options import RingOptions
from hetero.link.ring_transfer import RingEnds
from hetero.link.shared_memory import connect_on_host, pin, share_memory


def open_same_host(rendezvous: Rendezvous, options: RingOptions) -> RingLink:
    """Open one link. Collective between the two ends, which must run on one host.

    Over `shm` the rings are in host memory that both devices have pinned. Over `ipc` each is in the
    sender's device memory, which the receiver's device reads.
    """
    device, ring_bytes, is_shm = options.device, options.ring_bytes, options.transport == "shm"
    with ExitStack() as stack:
        control = stack.enter_context(connect_on_host(rendezvous))
        options.agree(control, rendezvous)
        sizes = (CONTROL_BYTES, ring_bytes, ring_bytes) if is_shm else (CONTROL_BYTES,)
        segments = share_memory(control, rendezvous, sizes=sizes)
        addresses = [pin(segment, device, stack) for segment in segments]
        side = rendezvous.side
        if is_shm:
            outgoing_ring, incoming_ring = addresses[1 + side], addresses[2 - side]
        else:
            outgoing_ring, incoming_ring = _share_device_memory(stack, control, device, ring_bytes)
        # Barrier: both ends have mapped everything.
        control.sendall(b"k")
        receive_exactly(control, 1)
        ends = RingEnds(
            outgoing=Direction(segments[0], side, addresses[0]),
            incoming=Direction(segments[0], 1 - side, addresses[0]),
            local=EndState(segments[0], side),
            peer=EndState(segments[0], 1 - side),
            outgoing_ring=outgoing_ring,
            incoming_ring=incoming_ring,
            peer_has_ended=partial(has_ended, control),
            close=stack.pop_all().close,
        )
    return RingLink(rendezvous.description, options, ends)


def _share_device_memory(
    stack: ExitStack, control: socket.socket, device: Device, nbytes: int
) -> tuple[int, int]:
    """This end's ring, allocated here, and the peer's, opened by its IPC handle."""
    mine, handle = device.allocate(nbytes)
    stack.callback(device.free, mine)
    send_json(control, {"handle": handle.hex()})
    theirs = device.open(bytes.fromhex(receive_json(control)["handle"]))
    stack.callback(device.close, theirs)
    return mine, theirs
