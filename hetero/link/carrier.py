"""The carrier of a link: the thread in C that connects its rings to the peer's over rails."""

from __future__ import annotations

import ctypes
import ipaddress
import secrets
import socket
from ctypes import byref, create_string_buffer
from dataclasses import asdict, dataclass
from typing import Any

from hetero.device.device import Device
from hetero.errors import LinkError
from hetero.link.rdma_ports import Port
from hetero.link.shared_memory import SharedMemory
from hetero.native.binding import native
from hetero.native.structures import (
    GID_BYTES,
    TEXT_BYTES,
    EngineOptions,
    TcpRequest,
    VerbsConnectionInfo,
    VerbsPeer,
    VerbsRequest,
    VerbsRoute,
)

_MAX_PSN = 1 << 24


@dataclass(frozen=True)
class RingMemory:
    """One end's memory, by the addresses of the CPU, the device and the carrier."""

    control: SharedMemory
    control_on_device: int
    rings: int
    """The carrier's address of the sending ring, which the receiving one follows."""
    rings_on_device: int
    ring_bytes: int
    """Of each ring."""
    checksum_bytes: int
    """Behind each entry in the ring."""
    zero_copy: bool = False
    """Whether larger messages skip the rings: the carrier can access the callers' tensors."""
    reads_back: bool = False
    """Whether a NIC's writes are visible to the device only after a read-back."""
    is_gpu_memory: bool = False
    dmabuf: tuple[int, int] | None = None
    """Descriptor and offset of the rings' dma-buf."""


@dataclass(frozen=True)
class ConnectionInfo:
    """What the peer needs to connect to this end of a rail and to write over it (docs/wire.md)."""

    port: dict[str, Any]
    psn: int
    qp: int
    receiving: int
    receiving_key: int
    control: int
    control_key: int
    reads_back: bool


class Carrier:
    """Any thread may call any method until `close`."""

    def __init__(self, memory: RingMemory, *, side: int, stall_seconds: float) -> None:
        """`side` is 0 for the listener. Raises LinkError when the system refuses what it needs."""
        self._library = native()
        self._memory = memory
        self._ports: list[Port] = []
        error = create_string_buffer(TEXT_BYTES)
        options = EngineOptions(
            control=memory.control.address,
            side=side,
            ring_bytes=memory.ring_bytes,
            checksum_bytes=memory.checksum_bytes,
            stall_seconds=stall_seconds,
        )
        self._handle: int | None = self._library.carrier_new(byref(options), error)
        if self._handle is None:
            raise LinkError(_text(error))

    def connect_device(self, device: Device) -> None:
        """Have the device notify the carrier of each word that it writes, if it can.

        If not, the thread polls the words. Call it before adding rails, and before the device
        makes streams.
        """
        function = ctypes.cast(self._library.carrier_progress, ctypes.c_void_p).value
        assert function is not None
        assert self._handle is not None
        if device.notify(function, self._handle):
            self._library.carrier_set_device_notifies(self._handle)

    def add_verbs_rail(self, port: Port) -> tuple[ConnectionInfo, str]:
        """Open a port; returns its connection info and how its NIC addresses the rings.

        Raises LinkError with what failed.
        """
        memory = self._memory
        psn = secrets.randbelow(_MAX_PSN)
        descriptor, offset = memory.dmabuf or (-1, 0)
        request = VerbsRequest(
            device=port.device.encode(),
            port=port.number,
            reads_back=memory.reads_back,
            dmabuf=descriptor,
            dmabuf_offset=offset,
            rings=memory.rings,
            ring_bytes=memory.ring_bytes,
            control=memory.control.address,
            psn=psn,
        )
        made, error = VerbsConnectionInfo(), create_string_buffer(TEXT_BYTES)
        if not self._library.carrier_add_verbs(self._handle, byref(request), byref(made), error):
            raise LinkError(
                f"{port} cannot be used for RDMA: {_text(error)}; see its state with `rdma link`, "
                f"and {_registration_remedy(is_gpu_memory=memory.is_gpu_memory)}"
            )
        self._ports.append(port)
        info = ConnectionInfo(
            port=asdict(port),
            psn=psn,
            qp=made.qp,
            receiving=made.receiving,
            receiving_key=made.receiving_key,
            control=made.control,
            control_key=made.control_key,
            reads_back=memory.reads_back,
        )
        return info, "dma-buf" if made.by_dmabuf else "address"

    def connect_verbs_rail(self, index: int, peer: ConnectionInfo) -> None:
        """Connect a rail and post its receives. Raises LinkError."""
        here, there = self._ports[index], Port(**peer.port)
        own = _route(here, here)
        remote = VerbsPeer(
            route=_route(here, there, qp=peer.qp, psn=peer.psn),
            receiving=peer.receiving,
            receiving_key=peer.receiving_key,
            control=peer.control,
            control_key=peer.control_key,
            reads_back=peer.reads_back,
        )
        error = create_string_buffer(TEXT_BYTES)
        if not self._library.carrier_connect_verbs(
            self._handle, index, byref(remote), byref(own), error
        ):
            raise LinkError(f"{here} cannot be connected with {there} of the peer ({_text(error)})")

    def add_tcp_rail(self, connection: socket.socket) -> None:
        """Make a rail of a connection, and take ownership of it. Raises LinkError."""
        memory = self._memory
        request = TcpRequest(
            fd=connection.detach(),
            sending=memory.rings,
            receiving=memory.rings + memory.ring_bytes,
            ring_bytes=memory.ring_bytes,
            control=memory.control.address,
        )
        error = create_string_buffer(TEXT_BYTES)
        if not self._library.carrier_add_tcp(self._handle, byref(request), error):
            raise LinkError(_text(error))

    def start(self) -> None:
        """Start the thread. Raises LinkError."""
        error = create_string_buffer(TEXT_BYTES)
        if not self._library.carrier_start(self._handle, error):
            raise LinkError(_text(error))

    def progress(self) -> None:
        """Send what has been posted. Does nothing once closed."""
        if self._handle is not None:
            self._library.carrier_progress(self._handle)

    @property
    def loss_fd(self) -> int:
        """Readable when the thread has lost a rail."""
        return int(self._library.carrier_loss_fd(self._handle))

    def async_fd(self, index: int) -> int:
        """Readable when a rail's device has an asynchronous event."""
        return int(self._library.carrier_async_fd(self._handle, index))

    def next_loss(self) -> tuple[int, str] | None:
        """The next lost rail that was not reported yet, and why."""
        reason = create_string_buffer(TEXT_BYTES)
        index = int(self._library.carrier_next_loss(self._handle, reason))
        return None if index < 0 else (index, _text(reason))

    def handle_async_event(self, index: int) -> str | None:
        """Handle a pending event of a rail's device; why the rail is lost, if it is."""
        reason = create_string_buffer(TEXT_BYTES)
        is_lost = self._library.carrier_handle_async_event(self._handle, index, reason)
        return _text(reason) if is_lost else None

    def stop_rail(self, index: int) -> None:
        """Stop a rail: nothing is sent or received over it any more."""
        self._library.carrier_stop_rail(self._handle, index)

    def retransmit(self, index: int) -> int:
        """Retransmit a rail's unfinished entries over others, after both ends have stopped it."""
        return int(self._library.carrier_retransmit(self._handle, index))

    def drain(self, seconds: float) -> bool:
        """Handle everything that has arrived; False if that took too long."""
        return bool(self._library.carrier_drain(self._handle, seconds))

    def flush_credits(self, seconds: float) -> bool:
        """Wait until the peer has all credits; False if that took too long."""
        return bool(self._library.carrier_flush_credits(self._handle, seconds))

    def close(self) -> None:
        """End the thread and close the rails. No other method may be running."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._library.carrier_free(handle)


def _registration_remedy(*, is_gpu_memory: bool) -> str:
    if not is_gpu_memory:
        return "raise the locked-memory limit (ulimit -l) or make the ring smaller"
    return (
        "RDMA to a GPU needs dma-buf (Linux 5.12, the GPU vendor's open kernel driver and a "
        "NIC driver that supports it) or the vendor's peer memory module (nvidia_peermem; for "
        "AMD, amdgpu with ROCm's peer memory support): load one, or choose --hetero-transport "
        "cpu-forward"
    )


def _route(here: Port, there: Port, *, qp: int = 0, psn: int = 0) -> VerbsRoute:
    return VerbsRoute(
        qp=qp,
        psn=psn,
        mtu=min(here.mtu, there.mtu),
        lid=there.lid,
        gid=(ctypes.c_uint8 * GID_BYTES)(*ipaddress.IPv6Address(there.gid).packed),
        gid_index=here.gid_index,
        is_global=here.needs_route_to(there),
    )


def _text(buffer: ctypes.Array[ctypes.c_char]) -> str:
    return buffer.value.decode(errors="replace")
