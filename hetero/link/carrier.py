"""The carrier of a link: the thread in C that connects its rings to the peer's over rails."""

from __future__ import annotations

import ctypes
import ipaddress
import secrets
import socket
from ctypes import byref, create_string_buffer
from dataclasses import asdict, dataclass
from typing import Any

from hetero.errors import LinkError
from hetero.link.rdma_ports import Port
from hetero.link.ring_options import RingOptions
from hetero.link.shared_memory import SharedMemory
from hetero.native.binding import checked, native
from hetero.native.structures import TEXT_BYTES, EngineOptions, VerbsEnd, VerbsRoute

_MAX_PSN = 1 << 24


@dataclass(frozen=True)
class RingMemory:
    """One end's memory, by the addresses of the CPU, the device and the carrier."""

    control: SharedMemory
    control_on_device: int
    rings: int
    """The carrier's address of the sending ring, which the receiving one follows."""
    rings_on_device: int
    reads_back: bool = False
    """Whether a NIC's writes are visible to the device only after a read-back."""
    is_gpu_memory: bool = False
    dmabuf: tuple[int, int] = (-1, 0)
    """Descriptor and offset of the rings' dma-buf; -1 without one."""


class Carrier:
    """Any thread may call any method until `close`."""

    def __init__(
        self, memory: RingMemory, options: RingOptions, *, side: int, stall_seconds: float
    ) -> None:
        """`side` is 0 for the listener. Call it before the device makes streams.

        Raises LinkError when the system refuses what it needs.
        """
        self._library = native()
        self._memory = memory
        self._ports: list[Port] = []
        self._handle: int | None = checked(
            self._library.carrier_new,
            byref(
                EngineOptions(
                    control=memory.control.address,
                    side=side,
                    rings=memory.rings,
                    ring_bytes=options.ring_bytes,
                    checksum_bytes=options.device.checksum_bytes,
                    stall_seconds=stall_seconds,
                    device_notifies=options.device.notifies,
                    reads_back=memory.reads_back,
                    dmabuf=memory.dmabuf[0],
                    dmabuf_offset=memory.dmabuf[1],
                )
            ),
        )
        self.wake = self._library.carrier_progress, self._handle
        """A function in C, and its argument, that sends what has been posted."""
        options.device.notify(*self.wake)

    def add_verbs_rail(self, port: Port) -> tuple[dict[str, Any], str]:
        """Open a port; returns its CONNECTION (docs/wire.md) and how its NIC addresses the rings.

        Raises LinkError with what failed.
        """
        end, by_dmabuf = VerbsEnd(psn=secrets.randbelow(_MAX_PSN)), ctypes.c_bool()
        arguments = port.device.encode(), port.number, byref(end), byref(by_dmabuf)
        try:
            checked(self._library.carrier_add_verbs, self._handle, *arguments)
        except LinkError as error:
            remedy = _registration_remedy(is_gpu_memory=self._memory.is_gpu_memory)
            raise LinkError(
                f"{port} cannot be used for RDMA: {error}; see its state with `rdma link`, and "
                f"{remedy}"
            ) from error
        self._ports.append(port)
        connection = {name: getattr(end, name) for name, _ in VerbsEnd._fields_}
        return {"port": asdict(port), **connection}, "dma-buf" if by_dmabuf else "address"

    def connect_verbs_rail(self, index: int, connection: dict[str, Any]) -> None:
        """Connect a rail with the peer's CONNECTION and post its receives. Raises LinkError."""
        here, there = self._ports[index], Port(**connection["port"])
        end = VerbsEnd(**{name: connection[name] for name, _ in VerbsEnd._fields_})
        routes = byref(_route(here, there)), byref(_route(here, here))
        try:
            checked(self._library.carrier_connect_verbs, self._handle, index, byref(end), *routes)
        except LinkError as error:
            raise LinkError(
                f"{here} cannot be connected with {there} of the peer ({error})"
            ) from error

    def add_tcp_rail(self, connection: socket.socket) -> None:
        """Make a rail of a connection. Close that after the carrier. Raises LinkError."""
        checked(self._library.carrier_add_tcp, self._handle, connection.fileno())

    def start(self) -> None:
        """Start the thread. Raises LinkError."""
        checked(self._library.carrier_start, self._handle)

    @property
    def loss_fd(self) -> int:
        """Readable when the thread has lost a rail."""
        return int(self._library.carrier_loss_fd(self._handle))

    def next_loss(self) -> tuple[int, str, bool] | None:
        """The next lost rail that was not reported yet, why, and if the peer's end looks so."""
        reason, may_have_ended = create_string_buffer(TEXT_BYTES), ctypes.c_bool()
        arguments = reason, byref(may_have_ended)
        index = int(self._library.carrier_next_loss(self._handle, *arguments))
        return None if index < 0 else (index, _text(reason), may_have_ended.value)

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


def _route(here: Port, there: Port) -> Any:
    """`struct verbs_route`."""
    gid = ipaddress.IPv6Address(there.gid).packed
    return VerbsRoute(
        mtu=min(here.mtu, there.mtu),
        lid=there.lid,
        gid=tuple(gid),
        gid_index=here.gid_index,
        is_global=here.needs_route_to(there),
    )


def _text(buffer: ctypes.Array[ctypes.c_char]) -> str:
    return buffer.value.decode(errors="replace")
