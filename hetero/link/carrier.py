"""The rails of a ring link between two hosts, and the connections beside them.

The rings at either end are connected by a carrier, a thread in C (hetero/native/carrier.c) that
sends over the rails. A control connection beside them says which rail is lost, why an end has
failed, and that it has closed; a monitor in each end acts on that.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import logging
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from ctypes import byref, create_string_buffer
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from hetero.device.device import Device
from hetero.errors import LinkError
from hetero.link.base import start_thread
from hetero.link.handshake import Rendezvous, send_json
from hetero.link.nics import Port
from hetero.link.ring import (
    CONTROL_BYTES,
    Direction,
    EndState,
    RingEnds,
    RingOptions,
    SharedMemory,
    make_memory,
    pin,
)
from hetero.native.binding import TEXT_BYTES, EngineOptions, VerbsEnd, VerbsRoute, checked, native
from hetero.startup.addresses import is_unreachable, keep_alive
from hetero.text import counted

_MAX_PSN = 1 << 24
_LENGTH = struct.Struct("<I")
_SEND_TIMEOUT = struct.pack("ll", 5, 0)
"""A `struct timeval`. With a timeout of Python's, `recv` would time out too."""
_JOIN_SECONDS = 15.0
"""Longer than the longest step of a monitor's thread: what that uses is freed after the join."""
_DRAIN_SECONDS = 10.0
"""The time after a peer's end for what it sent before, such as the last credit, to arrive. A packet
that is lost five times in a row takes 6 s."""
_ANSWER_SECONDS = 5.0
"""The time for a peer to report that it has stopped a rail too or, if the rail was lost by that,
that it has closed the link."""
_SLICE_SECONDS = 0.1
_CREDIT_SECONDS = 5.0
"""The time that closing waits for the last credits to be sent."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RingMemory:
    """One end's memory, by the addresses of the CPU, the device and the carrier."""

    control: SharedMemory
    control_on_device: int
    rings: int
    """The carrier's address of the sending ring, which the receiving one follows."""
    rings_on_device: int
    reads_back: bool = False
    """True if a NIC's writes are visible to the device only after a read-back."""
    is_gpu_memory: bool = False
    dmabuf: tuple[int, int] = (-1, 0)
    """Descriptor and offset of the rings' dma-buf; -1 without one."""


class Carrier:
    """The thread in C and its rails. Any thread may call any method until `close`."""

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
        """A lost rail not reported yet, why, and whether the peer's end would look the same."""
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


class PathsLost(ConnectionError):
    """The peer's host is unreachable over every path; the peer itself may still run."""


class Control:
    """JSON messages to and from the peer, over one authenticated connection for each network path.

    Each message is sent over every connection that is left, and duplicates are dropped, so that it
    arrives even if a path is lost. The peer has ended when it says so, or when no connection is
    left. Reading never blocks.
    """

    def __init__(self, *connections: socket.socket, ack_timeout: float | None = None) -> None:
        """`ack_timeout`: seconds without a TCP acknowledgement that end a connection."""
        self._connections = list(connections)
        self._peers = [str(connection.getpeername()[0]) for connection in connections]
        self._unread = {connection: bytearray() for connection in connections}
        self._sent = 0
        self._last_received = 0
        for connection in connections:
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
            keep_alive(connection, ack_timeout=ack_timeout)

    def filenos(self) -> list[int]:
        return [connection.fileno() for connection in self._connections]

    def readable(self, seconds: float) -> list[int]:
        """Wait up to `seconds` for data; returns the descriptors that can be read."""
        poller = select.poll()  # select() refuses descriptors above 1023
        for descriptor in self.filenos():
            poller.register(descriptor, select.POLLIN)
        return [descriptor for descriptor, _ in poller.poll(1000 * seconds)]

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises OSError when no connection accepts it."""
        self._sent += 1
        sent = False
        for connection in list(self._connections):
            try:
                send_json(connection, {"number": self._sent, **message})
                sent = True
            except OSError:
                # It may be cut short, so send nothing after it. `receive` drops the connection.
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        if not sent:
            raise ConnectionError("no path to the peer is left")

    def receive(self, descriptor: int) -> list[dict[str, Any]]:
        """The new messages that are complete on one connection.

        Drops a connection that has ended, which is closed only with the others. Raises PathsLost
        if the last one has because the peer's host does not answer, and ConnectionError if it has
        because the peer has ended.
        """
        connection = next(c for c in self._connections if c.fileno() == descriptor)
        try:
            data = connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            self._drop(connection, error if is_unreachable(error) else None)
            return []
        if not data:
            self._drop(connection, None)
            return []
        return [m for m in self._complete(connection, data) if self._is_new(m)]

    def _drop(self, connection: socket.socket, unreachable: OSError | None) -> None:
        self._connections.remove(connection)
        if not self._connections and unreachable is not None:
            raise PathsLost(
                f"nothing answers at {', '.join(self._peers)} ({unreachable.strerror}); see "
                "whether its host runs, and the network between"
            )
        if not self._connections:
            raise ConnectionError("the peer has ended")

    def _is_new(self, message: dict[str, Any]) -> bool:
        if message["number"] <= self._last_received:
            return False
        self._last_received = message["number"]
        return True

    def _complete(self, connection: socket.socket, data: bytes) -> list[dict[str, Any]]:
        unread = self._unread[connection]
        unread += data
        messages = []
        while len(unread) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(unread)
            end = _LENGTH.size + length
            if len(unread) < end:
                break
            messages.append(dict(json.loads(unread[_LENGTH.size : end])))
            del unread[:end]
        return messages

    def close(self) -> None:
        """Say that this end is closing, and close."""
        with suppress(OSError):
            self.send({"closed": True})
        for connection in self._unread:
            connection.close()


@dataclass
class RailState:
    """The state of a rail, as both ends have reported it."""

    name: str
    live: bool = True
    peer_has_stopped: bool = False
    loss: str = ""
    """Why the rail was lost."""
    is_reported: bool = False
    """True if the loss is certain, rather than the end of the peer."""


class RailMonitor:
    """A thread that handles lost rails and the peer's control messages.

    A lost rail's unfinished entries are retransmitted only when both ends have stopped it: until
    then a late packet could overwrite a slot that is in use again.
    """

    def __init__(
        self,
        carrier: Carrier,
        control: Control,
        *,
        rails: Sequence[str],
        local: EndState,
        remote: EndState,
        name: str,
        peer: int,
    ) -> None:
        """`remote` is this end's copy of the peer's state; its error flag fails the link."""
        self._carrier = carrier
        self._control = control
        self._rails = [RailState(name) for name in rails]
        self._local, self._remote = local, remote
        self._name = name
        self._peer = peer
        self._sending = threading.Lock()
        self._peer_has_ended = self._stopping = False
        self._handlers = selectors.DefaultSelector()
        for descriptor in control.filenos():
            self._register(descriptor, partial(self._handle_control, descriptor))
        self._register(carrier.loss_fd, self._handle_losses)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Raises LinkError if it cannot. Call `close` in any case."""
        start_thread(self._thread)

    def peer_has_ended(self) -> bool:
        """Returns whether the peer has ended or closed the link, and all it sent has arrived."""
        return self._peer_has_ended

    def send_fault(self, reason: str) -> None:
        """Send this end's error to the peer. From any thread."""
        # If it fails, the peer has ended and needs no error.
        with contextlib.suppress(OSError):
            self._send({"fault": reason})

    def close(self) -> None:
        """End the thread and the control connections, which tells the peer that this end has."""
        self._stopping = True
        os.eventfd_write(self._carrier.loss_fd, 1)  # wakes the thread
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)
        self._control.close()
        self._handlers.close()

    def _register(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers.register(descriptor, selectors.EVENT_READ, handler)

    def _unregister(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._handlers.unregister(descriptor)

    def _run(self) -> None:
        while not self._stopping:
            ready = self._handlers.select()
            try:
                for key, _ in ready:
                    # An earlier handler may have unregistered it.
                    if key.fd in self._handlers.get_map() and not self._stopping:
                        key.data()
            except Exception as error:  # whatever it is, fail the link
                self._fail(f"the link's watch failed ({error})")
                _log.exception("%s: the watch failed", self._name)
                return

    def _handle_losses(self) -> None:
        while (loss := self._carrier.next_loss()) is not None:
            index, reason, may_have_ended = loss
            self._lose(index, reason, may_have_ended=may_have_ended)

    def _await_answer(self, rail: RailState) -> None:
        """Wait until the peer has stopped a rail too, or has ended.

        The rails of a peer that closes the link may end before its message arrives.
        """
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not (rail.peer_has_stopped or self._peer_has_ended or self._stopping):
            if time.monotonic() > deadline:
                return
            for descriptor in self._control.readable(_SLICE_SECONDS):
                self._handle_control(descriptor)

    def _drain(self) -> None:
        """Handle everything that the peer sent before it ended."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while not (self._stopping or self._carrier.drain(_SLICE_SECONDS)):
            if time.monotonic() > deadline:
                return

    def _handle_control(self, descriptor: int) -> None:
        if self._peer_has_ended:
            return
        try:
            messages = self._control.receive(descriptor)
        except ConnectionError as ended:
            if isinstance(ended, PathsLost):
                self._fail(f"rank {self._peer} cannot be reached any more: {ended}")
            self._end_with_peer(descriptor)
            return
        if descriptor not in self._control.filenos():
            self._unregister(descriptor)
        for message in messages:
            if "fault" in message:
                self._fail(str(message["fault"]))
            if "lost" in message:
                self._handle_peer_loss(int(message["lost"]), str(message["reason"]))
            if "closed" in message:
                self._end_with_peer(descriptor)

    def _end_with_peer(self, descriptor: int) -> None:
        for known in (descriptor, *self._control.filenos()):
            self._unregister(known)
        self._drain()
        self._peer_has_ended = True
        self._local.ring()

    def _handle_peer_loss(self, index: int, reason: str) -> None:
        rail = self._rails[index]
        rail.peer_has_stopped = True
        if rail.live:
            self._lose(index, f"rank {self._peer} says: {reason}")
        elif rail.is_reported:
            self._retransmit(index)
        else:
            self._report(index)

    def _lose(self, index: int, reason: str, *, may_have_ended: bool = False) -> None:
        """Stop a rail at this end and have the peer stop it too.

        `may_have_ended`: the reason may be that the peer has ended or closed the link.
        """
        rail = self._rails[index]
        if not rail.live:
            return
        rail.live, rail.loss = False, reason
        self._carrier.stop_rail(index)
        if self._peer_has_ended:
            return
        # If it fails the control connections have ended, and the answer is that the peer has.
        with contextlib.suppress(OSError):
            self._send({"lost": index, "reason": reason})
        if may_have_ended:
            self._await_answer(rail)
        self._report(index)

    def _report(self, index: int) -> None:
        """Log that a rail is lost, unless it has ended with the peer, and go on without it."""
        rail = self._rails[index]
        # An end that is closing no longer reads that the peer has closed too.
        if rail.is_reported or self._peer_has_ended or self._stopping:
            return
        rail.is_reported = True
        left = sum(other.live for other in self._rails)
        _log.warning("%s: %s", self._name, self._loss(index))
        if left == 0:
            self._fail(f"the last rail, {rail.name}, is lost: {rail.loss}")
        if rail.peer_has_stopped:
            self._retransmit(index)

    def _loss(self, index: int) -> str:
        """Describe what was lost and what is left. To users a rail is a pair of NICs."""
        lost = self._rails[index]
        names = list(dict.fromkeys(rail.name for rail in self._rails))
        live = {rail.name for rail in self._rails if rail.live}
        what = f"rail {names.index(lost.name)} ({lost.name})"
        left = f"{len(live)} of {len(names)} rails"
        if len(names) == len(self._rails):
            return f"{what} is lost: {lost.loss}; {left} go on"
        count = sum(rail.name == lost.name for rail in self._rails)
        number = sum(rail.name == lost.name for rail in self._rails[:index])
        live_count = sum(rail.live for rail in self._rails)
        connections = f"{live_count} of {counted(len(self._rails), 'connection')}"
        return (
            f"connection {number + 1} of the {count} of {what} is lost: {lost.loss}; "
            f"{connections} go on, over {left}"
        )

    def _retransmit(self, index: int) -> None:
        count = self._carrier.retransmit(index)
        if count:
            entries = f"{counted(count, 'entry', 'entries')} of rail {index}"
            _log.warning("%s: %s sent again", self._name, entries)

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._control.send(message)

    def _fail(self, reason: str) -> None:
        if not self._remote.has_failed:
            self._remote.fail(reason)
        self._local.ring()


def host_memory(nbytes: int, device: Device, stack: ExitStack) -> tuple[SharedMemory, int]:
    """Pinned host memory and the device's address of it, freed when the stack unwinds."""
    memory = SharedMemory(make_memory(nbytes), nbytes)
    return memory, pin(memory, device, stack)


def host_rings(options: RingOptions, stack: ExitStack, *, reads_back: bool = False) -> RingMemory:
    """Both rings in host memory."""
    control, control_on_device = host_memory(CONTROL_BYTES, options.device, stack)
    rings, on_device = host_memory(2 * options.ring_bytes, options.device, stack)
    return RingMemory(control, control_on_device, rings.address, on_device, reads_back)


def make_ends(
    rendezvous: Rendezvous,
    options: RingOptions,
    memory: RingMemory,
    carrier: Carrier,
    control: Control,
    *,
    rails: Sequence[str],
    stack: ExitStack,
) -> RingEnds:
    """The ends of a link, which own what is on the stack from here on. Start the carrier first."""
    side, description = rendezvous.side, rendezvous.description
    local = EndState(memory.control, side)
    # The peer's state is a copy here: waking the peer means waking the carrier that sends to it.
    remote = EndState(memory.control, 1 - side, wake=carrier.wake)
    monitor = RailMonitor(
        carrier,
        control,
        rails=rails,
        local=local,
        remote=remote,
        name=f"{options.transport} {description.rank}-{description.peer}",
        peer=description.peer,
    )
    stack.callback(monitor.close)
    monitor.start()
    local.tell_peer = monitor.send_fault
    stack.callback(_flush_credits, carrier, monitor, local, remote)
    return RingEnds(
        outgoing=Direction(memory.control, side, memory.control_on_device),
        incoming=Direction(memory.control, 1 - side, memory.control_on_device),
        local=local,
        peer=remote,
        outgoing_ring=memory.rings_on_device,
        incoming_ring=memory.rings_on_device + options.ring_bytes,
        peer_has_ended=monitor.peer_has_ended,
        close=stack.pop_all().close,
    )


def _flush_credits(
    carrier: Carrier, monitor: RailMonitor, local: EndState, remote: EndState
) -> None:
    """Send the last credits before this end closes: the peer's sends wait for them."""
    if not (local.has_failed or remote.has_failed or monitor.peer_has_ended()):
        carrier.flush_credits(_CREDIT_SECONDS)
