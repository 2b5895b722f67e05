"""CPU forwarding between hosts: a ring on each side, and several TCP connections between them.

Each connection has a thread of its own that takes the next published chunk, so a faster
connection carries more of them and none waits for another. The receiver reads straight into the
slot that the chunk's number names, and does not read further while that slot is in use: TCP's own
flow control then holds the sender back.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil
import torch

from hetero.device.base import DeviceRuntime
from hetero.transport.chunked import Chunk, RecvEnd, RingShape, SendEnd
from hetero.transport.handshake import Meeting, accept, compare, connect, look_up, publish
from hetero.transport.header import HEADER_BYTES, PROTOCOL_VERSION

_FRAME = struct.Struct(f"<Q{HEADER_BYTES}sQQI")
_SOCKET_BUFFER = 4 << 20
_JOIN_SECONDS = 5.0
_REFUSAL_BYTES = 512


class _LocalRing:
    """One side's slots, registered with the device."""

    def __init__(self, shape: RingShape, runtime: DeviceRuntime) -> None:
        self.shape = shape
        self._runtime = runtime
        self._data = torch.empty(shape.slots * shape.slot_bytes, dtype=torch.uint8)
        self._bytes = self._data.numpy().data
        runtime.register(self._data)

    def slot(self, number: int) -> torch.Tensor:
        begin = number % self.shape.slots * self.shape.slot_bytes
        return self._data[begin : begin + self.shape.slot_bytes]

    def view(self, number: int, nbytes: int) -> memoryview:
        begin = number % self.shape.slots * self.shape.slot_bytes
        return self._bytes[begin : begin + nbytes]

    def close(self) -> None:
        self._runtime.unregister(self._data)


@dataclass
class _Shared:
    """What an end's threads share: a condition, and the first error any of them met."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    error: Exception | None = None
    closed: bool = False

    def fail(self, error: Exception) -> None:
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def wait_until(self, ready: Callable[[], bool], deadline: float, *, peer: int) -> None:
        """Called with the condition held."""
        while not ready():
            self.raise_if_over()
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(f"rank {peer} did not move within the time allowed")
            self.changed.wait(remaining)

    def raise_if_over(self) -> None:
        if self.closed:
            raise ConnectionError("the link was closed")
        if self.error is not None:
            raise self.error


class _End(ABC):
    """Connections with a thread each, over one local ring."""

    def __init__(
        self, connections: Sequence[socket.socket], ring: _LocalRing, peer: int, name: str
    ) -> None:
        self._connections = connections
        self._ring = ring
        self._peer = peer
        self._shared = _Shared()
        self.slot_bytes = ring.shape.slot_bytes
        self._threads = [
            threading.Thread(
                target=self._run, args=(connection,), name=f"tcp {name} {index}", daemon=True
            )
            for index, connection in enumerate(connections)
        ]

    def _start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _run(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        except (OSError, ValueError) as error:
            self._shared.fail(
                ConnectionError(f"rank {self._peer} has ended or closed the link ({error})")
            )

    @abstractmethod
    def _serve(self, connection: socket.socket) -> None:
        """Move chunks over one connection until it ends; runs in that connection's thread."""

    def _shut(self) -> None:
        with self._shared.changed:
            self._shared.closed = True
            self._shared.changed.notify_all()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        self._ring.close()


class TcpSendEnd(_End, SendEnd):
    """Fills its own slots; a slot is free again when its chunk has been handed to the kernel."""

    def __init__(
        self, connections: Sequence[socket.socket], ring: _LocalRing, peer: int, name: str
    ) -> None:
        super().__init__(connections, ring, peer, name + " send")
        self._acquired = 0
        self._published = 0
        self._busy = [False] * ring.shape.slots
        self._frames: queue.SimpleQueue[tuple[int, Chunk] | None] = queue.SimpleQueue()
        self._start()

    def acquire(self, deadline: float | None) -> torch.Tensor | None:
        index = self._acquired % self._ring.shape.slots
        self._raise_refusal()
        with self._shared.changed:
            self._shared.raise_if_over()
            if self._busy[index]:
                if deadline is None:
                    return None
                self._shared.wait_until(lambda: not self._busy[index], deadline, peer=self._peer)
            self._busy[index] = True
        slot = self._ring.slot(self._acquired)
        self._acquired += 1
        return slot

    def publish(self, chunk: Chunk) -> None:
        self._shared.raise_if_over()
        self._frames.put((self._published, chunk))
        self._published += 1

    def close(self) -> None:
        if self._shared.closed:
            return
        for _ in self._threads:
            self._frames.put(None)
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        self._shut()

    def _serve(self, connection: socket.socket) -> None:
        while (frame := self._frames.get()) is not None:
            number, chunk = frame
            prefix = _FRAME.pack(number, chunk.header, chunk.offset, chunk.nbytes, chunk.checksum)
            connection.sendall(prefix, socket.MSG_MORE)
            connection.sendall(self._ring.view(number, chunk.nbytes))
            with self._shared.changed:
                self._busy[number % self._ring.shape.slots] = False
                self._shared.changed.notify_all()

    def _raise_refusal(self) -> None:
        """The receiver writes to the sender only to refuse; anything else readable is its end."""
        poller = select.poll()
        for connection in self._connections:
            poller.register(connection, select.POLLIN)
        for descriptor, _ in poller.poll(0):
            connection = next(c for c in self._connections if c.fileno() == descriptor)
            text = connection.recv(_REFUSAL_BYTES)
            reason = (
                text.decode(errors="replace") or f"rank {self._peer} has ended or closed the link"
            )
            raise ConnectionError(reason)


class TcpRecvEnd(_End, RecvEnd):
    """Reads chunks into the slots that their numbers name, and hands them over in order."""

    def __init__(
        self, connections: Sequence[socket.socket], ring: _LocalRing, peer: int, name: str
    ) -> None:
        super().__init__(connections, ring, peer, name + " recv")
        self._taken = 0
        self._released = 0
        self._arrived: dict[int, Chunk] = {}
        self._start()

    def take(self, deadline: float | None) -> tuple[Chunk, torch.Tensor] | None:
        with self._shared.changed:
            if self._taken not in self._arrived:
                self._shared.raise_if_over()
                if deadline is None:
                    return None
                self._shared.wait_until(
                    lambda: self._taken in self._arrived, deadline, peer=self._peer
                )
            chunk = self._arrived.pop(self._taken)
        slot = self._ring.slot(self._taken)[: chunk.nbytes]
        self._taken += 1
        return chunk, slot

    def release(self) -> None:
        with self._shared.changed:
            self._released += 1
            self._shared.changed.notify_all()

    def refuse(self, reason: str) -> None:
        try:
            self._connections[0].sendall(reason.encode()[:_REFUSAL_BYTES])
        except OSError:  # the sender has gone already
            return

    def close(self) -> None:
        if not self._shared.closed:
            self._shut()

    def _serve(self, connection: socket.socket) -> None:
        prefix = bytearray(_FRAME.size)
        while True:
            _receive_into(connection, memoryview(prefix))
            number, header, offset, nbytes, checksum = _FRAME.unpack(prefix)
            if nbytes > self.slot_bytes:
                raise ValueError(f"a chunk of {nbytes} bytes does not fit a slot")
            with self._shared.changed:
                while number - self._released >= self._ring.shape.slots:
                    if self._shared.closed or self._shared.error is not None:
                        return
                    self._shared.changed.wait()
            _receive_into(connection, self._ring.view(number, nbytes))
            with self._shared.changed:
                self._arrived[number] = Chunk(header, offset, nbytes, checksum)
                self._shared.changed.notify_all()


def _receive_into(connection: socket.socket, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        count = connection.recv_into(buffer[done:])
        if count == 0:
            raise ConnectionError("end of stream")
        done += count


@dataclass(frozen=True)
class TcpPaths:
    """The local addresses a link may use, one a network interface, and its connections."""

    addresses: tuple[str, ...]
    connections: int = 4

    def address_of(self, index: int) -> str:
        return self.addresses[index % len(self.addresses)]


def interface_address(name: str) -> str | None:
    """The IPv4 address of a network interface; None where it has none or does not exist."""
    for entry in psutil.net_if_addrs().get(name, []):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    return None


def address_towards(host: str) -> str:
    """The local IPv4 address from which packets to a host leave."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def open_tcp(
    meeting: Meeting, *, shape: RingShape, paths: TcpPaths, runtime: DeviceRuntime
) -> tuple[TcpSendEnd, TcpRecvEnd]:
    """Open both directions, `paths.connections` TCP connections each, spread over the addresses."""
    both = _listen(meeting, paths) if meeting.listens else _call(meeting, paths)
    for connection in both:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
    compare(
        both[0],
        meeting,
        {"protocol": PROTOCOL_VERSION, "slots": shape.slots, "slot_bytes": shape.slot_bytes},
    )
    half = len(both) // 2
    outgoing, incoming = both[:half], both[half:]
    if not meeting.listens:
        outgoing, incoming = incoming, outgoing
    peer, name = meeting.description.peer, f"{meeting.description.rank}-{meeting.description.peer}"
    return (
        TcpSendEnd(outgoing, _LocalRing(shape, runtime), peer, name),
        TcpRecvEnd(incoming, _LocalRing(shape, runtime), peer, name),
    )


def _listen(meeting: Meeting, paths: TcpPaths) -> list[socket.socket]:
    listeners = []
    try:
        for address in paths.addresses:
            listener = socket.create_server((address, 0), backlog=2 * paths.connections)
            listeners.append(listener)
        publish(
            meeting,
            "tcp addresses",
            {
                "addresses": [list(listener.getsockname()) for listener in listeners],
                "connections": paths.connections,
            },
        )
        return [
            accept(listeners[index % len(listeners)], meeting)[0]
            for index in range(2 * paths.connections)
        ]
    finally:
        for listener in listeners:
            listener.close()


def _call(meeting: Meeting, paths: TcpPaths) -> list[socket.socket]:
    told = look_up(meeting, "tcp addresses")
    addresses = [(str(host), int(port)) for host, port in told["addresses"]]
    return [
        connect(
            addresses[index % len(addresses)],
            meeting,
            family=socket.AF_INET,
            source=(paths.address_of(index), 0),
        )
        for index in range(2 * int(told["connections"]))
    ]
