"""A link's carrier as Python uses it: the thread in C, its words and its rails."""

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
class CarriedMemory:
    """One end's memory, as its own code, its device and its carrier reach it."""

    control: SharedMemory
    control_on_device: int
    rings: int
    """Address of the sending ring, which the receiving one follows, for the carrier."""
    rings_on_device: int
    ring_bytes: int
    """Of each ring."""
    checksum_bytes: int
    """What follows an entry's bytes in the ring."""
    zero_copy: bool = False
    """Whether the carrier reaches the callers' tensors, past the rings."""
    reads_back: bool = False
    """Whether a NIC has to read its writes back before they count as arrived."""
    of_gpu: bool = False
    """Whether the rings are a GPU's memory."""
    dmabuf: tuple[int, int] | None = None
    """Descriptor and offset of the rings' dma-buf."""


@dataclass(frozen=True)
class ConnectionInfo:
    """What the peer has to know of this end of a rail to connect it and to write over it."""

    port: dict[str, Any]
    psn: int
    qp: int
    receiving: int
    receiving_key: int
    control: int
    control_key: int
    reads_back: bool


class Carrier:
    """A link's thread in C. Every method may be called from any thread until `close`."""

    def __init__(self, memory: CarriedMemory, *, side: int, stall_seconds: float) -> None:
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

    def follow(self, device: Device) -> None:
        """Have the device call the carrier after each word that it writes, if it can.

        Where it cannot, the thread looks at the words while something is under way. Called before
        the first rail is added, and before streams of the device are made.
        """
        function = ctypes.cast(self._library.carrier_progress, ctypes.c_void_p).value
        assert function is not None
        assert self._handle is not None
        if device.notify(function, self._handle):
            self._library.carrier_set_device_notifies(self._handle)

    def add_verbs_rail(self, port: Port) -> tuple[ConnectionInfo, str]:
        """Open a port; what the peer must know of it, and how it knows the rings' memory.

        Raises LinkError with what the port refused.
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
                f"and {_registration_remedy(of_gpu=memory.of_gpu)}"
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
        """Let a rail go both ways. Receives are posted when this returns. Raises LinkError."""
        here, there = self._ports[index], Port(**peer.port)
        own = _route(here, here)
        told = VerbsPeer(
            route=_route(here, there, qp=peer.qp, psn=peer.psn),
            receiving=peer.receiving,
            receiving_key=peer.receiving_key,
            control=peer.control,
            control_key=peer.control_key,
            reads_back=peer.reads_back,
        )
        error = create_string_buffer(TEXT_BYTES)
        if not self._library.carrier_connect_verbs(
            self._handle, index, byref(told), byref(own), error
        ):
            raise LinkError(f"{here} cannot be connected with {there} of the peer ({_text(error)})")

    def add_tcp_rail(self, connection: socket.socket) -> None:
        """Take a connection over. Raises LinkError when there can be no rail."""
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
        """Begin to carry. Raises LinkError when there can be no thread."""
        error = create_string_buffer(TEXT_BYTES)
        if not self._library.carrier_start(self._handle, error):
            raise LinkError(_text(error))

    def progress(self) -> None:
        """Have what has been posted go on its way. Nothing once it is closed."""
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
        """The next rail that the thread has lost, and why."""
        reason = create_string_buffer(TEXT_BYTES)
        index = int(self._library.carrier_next_loss(self._handle, reason))
        return None if index < 0 else (index, _text(reason))

    def handle_async_event(self, index: int) -> str | None:
        """Take one event of a device, which must be there; why the rail is lost if it is."""
        reason = create_string_buffer(TEXT_BYTES)
        is_lost = self._library.carrier_handle_async_event(self._handle, index, reason)
        return _text(reason) if is_lost else None

    def stop_rail(self, index: int) -> None:
        """Stop a rail: nothing goes out or comes in over it from here on."""
        self._library.carrier_stop_rail(self._handle, index)

    def retransmit(self, index: int) -> int:
        """Have the unfinished entries of a rail, which both ends have stopped, go over others."""
        return int(self._library.carrier_retransmit(self._handle, index))

    def settle(self, seconds: float) -> bool:
        """Take in what has arrived by now; False if that was not possible in time."""
        return bool(self._library.carrier_drain(self._handle, seconds))

    def settle_credits(self, seconds: float) -> bool:
        """See that the peer hears what was consumed; False if that was not possible in time."""
        return bool(self._library.carrier_flush_credits(self._handle, seconds))

    def close(self) -> None:
        """End the thread and close the rails. Nobody may be in another method by now."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._library.carrier_free(handle)


def _registration_remedy(*, of_gpu: bool) -> str:
    """What to do where a NIC refuses to register host memory or that of a GPU."""
    if not of_gpu:
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
