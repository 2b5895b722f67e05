"""Links between two devices of one host: rings in memory of the host (`shm`) or of GPUs (`ipc`).

Memory of the host is a memfd passed over a Unix socket, so it is freed with the last process that
maps it, however that process ends. The socket stays open: it closes when the peer dies.
"""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from hetero.device.device import Device
from hetero.link.handshake import (
    Rendezvous,
    accept,
    connect,
    has_ended,
    look_up,
    publish,
    receive_exactly,
    receive_json,
    send_json,
)
from hetero.link.ring import (
    CONTROL_BYTES,
    Direction,
    EndState,
    RingEnds,
    RingOptions,
    SharedMemory,
    make_memory,
    new_event,
    pin,
)
from hetero.link.ring_link import RingLink


def host_identity() -> dict[str, str]:
    """Equal at two ends that can share memory and a Unix socket."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Abstract Unix sockets live in the network namespace.
    return {"boot": boot, "network": os.readlink("/proc/self/ns/net")}


def connect_on_host(rendezvous: Rendezvous) -> socket.socket:
    """A Unix socket between the two ends, authenticated both ways."""
    if rendezvous.listens:
        name = f"hetero-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("\0" + name)
            listener.listen()
            publish(rendezvous, "shm address", {"name": name})
            control = accept(listener, rendezvous)
    else:
        name = look_up(rendezvous, "shm address")["name"]
        control = connect("\0" + name, rendezvous, family=socket.AF_UNIX)
    control.settimeout(rendezvous.timeout)
    return control


def share_memory(
    control: socket.socket, rendezvous: Rendezvous, *, sizes: tuple[int, ...]
) -> list[SharedMemory]:
    """Segments that both ends map, in the same order. The listener creates and passes them."""
    descriptors: list[int] = []
    try:
        if rendezvous.listens:
            for nbytes in sizes:
                descriptors.append(make_memory(nbytes))
            socket.send_fds(control, [b"r"], descriptors)
        else:
            descriptors += socket.recv_fds(control, 1, len(sizes))[1]
            if len(descriptors) != len(sizes):
                raise ConnectionError(f"the peer handed over {len(descriptors)} pieces of memory")
        return [SharedMemory(descriptors.pop(0), nbytes) for nbytes in sizes]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def exchange_events(control: socket.socket, event: int, stack: ExitStack) -> int:
    """Pass the peer this end's eventfd; returns the peer's, closed when the stack unwinds."""
    socket.send_fds(control, [b"e"], [event])
    received = socket.recv_fds(control, 1, 1)[1]
    for descriptor in received:
        stack.callback(os.close, descriptor)
        os.set_inheritable(descriptor, False)
    if not received:
        raise ConnectionError("the peer passed no eventfd")
    return received[0]


def open_shared_memory(rendezvous: Rendezvous, options: RingOptions) -> RingLink:
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
        event = new_event(stack)
        peers_event = exchange_events(control, event, stack)
        # Barrier: both ends have mapped everything.
        control.sendall(b"k")
        receive_exactly(control, 1)
        ends = RingEnds(
            outgoing=Direction(segments[0], side, addresses[0]),
            incoming=Direction(segments[0], 1 - side, addresses[0]),
            local=EndState(segments[0], side),
            peer=EndState(segments[0], 1 - side, event=peers_event),
            outgoing_ring=outgoing_ring,
            incoming_ring=incoming_ring,
            event=event,
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
