"""Shared memory and a control socket between two ends on one host.

The memory is a memfd passed over a Unix socket, so it is freed with the last process that maps it,
however that process ends. The socket stays open: it closes when the peer dies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import socket
from contextlib import ExitStack
from pathlib import Path

from hetero.device.device import Device
from hetero.link.handshake import Rendezvous, accept, connect, look_up, publish

PAGE = 4096


def host_identity() -> dict[str, str]:
    """Equal at two ends that can share memory and a Unix socket."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Abstract Unix sockets live in the network namespace.
    return {"boot": boot, "network": os.readlink("/proc/self/ns/net")}


def connect_on_host(rendezvous: Rendezvous) -> socket.socket:
    """A Unix socket between the two ends, authenticated both ways."""
    control = _listen(rendezvous) if rendezvous.listens else _connect(rendezvous)
    control.settimeout(rendezvous.timeout)
    return control


def _listen(rendezvous: Rendezvous) -> socket.socket:
    name = f"hetero-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen()
        publish(rendezvous, "shm address", {"name": name})
        return accept(listener, rendezvous)


def _connect(rendezvous: Rendezvous) -> socket.socket:
    name = look_up(rendezvous, "shm address")["name"]
    return connect("\0" + name, rendezvous, family=socket.AF_UNIX)


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


def make_memory(nbytes: int) -> int:
    """The descriptor of anonymous shared memory."""
    descriptor = os.memfd_create("hetero-ring", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def pin(memory: SharedMemory, device: Device, stack: ExitStack) -> int:
    """Map memory for a device, until the stack unwinds; returns the device's address of it."""
    stack.callback(memory.close)
    address = device.register(memory.address, memory.nbytes)
    stack.callback(device.unregister, memory.address)
    return address


class SharedMemory:
    """One mapping, as bytes and 32-bit words; `close` invalidates both. Idempotent."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Closes the descriptor."""
        try:
            self._map = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("I")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.nbytes = nbytes

    def close(self) -> None:
        self.words.release()
        self.bytes.release()
        self._map.close()
