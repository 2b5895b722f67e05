"""The two ends of a ring whose slots cross over TCP connections, for tensors of a device.

The receiver reads straight into the slot that a chunk's number names, and does not read further
while that slot is in use: TCP's own flow control then holds the sender back.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hetero.device.base import DeviceRuntime
from hetero.transport.chunked import Chunk, RecvEnd, RingShape, SendEnd
from hetero.transport.tcp.wire import Backchannel, Frame, receive_frame, receive_into, refuse

_JOIN_SECONDS = 5.0


class LocalRing:
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
        self, connections: Sequence[socket.socket], ring: LocalRing, peer: int, name: str
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
            self._shared.fail(self._end_of_peer(error))

    def _end_of_peer(self, reason: Exception) -> ConnectionError:
        return ConnectionError(f"rank {self._peer} has ended or closed the link ({reason})")

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
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        for connection in self._connections:
            connection.close()
        self._ring.close()


class TcpSendEnd(_End, SendEnd):
    """Fills its own slots; a slot is free again when its chunk has been handed to the kernel."""

    def __init__(
        self, connections: Sequence[socket.socket], ring: LocalRing, peer: int, name: str
    ) -> None:
        super().__init__(connections, ring, peer, name + " send")
        self._acquired = 0
        self._published = 0
        self._busy = [False] * ring.shape.slots
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._backchannel = Backchannel(connections, peer)
        self._start()

    def acquire(self, deadline: float | None) -> torch.Tensor | None:
        index = self._acquired % self._ring.shape.slots
        self._backchannel.check()
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
        self._frames.put(
            Frame(self._published, chunk.header, chunk.offset, chunk.nbytes, chunk.checksum)
        )
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
            connection.sendall(frame.pack(), socket.MSG_MORE)
            connection.sendall(self._ring.view(frame.number, frame.nbytes))
            with self._shared.changed:
                self._busy[frame.number % self._ring.shape.slots] = False
                self._shared.changed.notify_all()


class TcpRecvEnd(_End, RecvEnd):
    """Reads chunks into the slots that their numbers name, and hands them over in order."""

    def __init__(
        self, connections: Sequence[socket.socket], ring: LocalRing, peer: int, name: str
    ) -> None:
        super().__init__(connections, ring, peer, name + " recv")
        self._taken = 0
        self._released = 0
        self._arrived: dict[int, Chunk] = {}
        self._ended_streams = 0
        self._waiting: list[int] = []
        """The chunks that wait in their connections for a slot."""
        self._start()

    def take(self, deadline: float | None) -> tuple[Chunk, torch.Tensor] | None:
        with self._shared.changed:
            if self._taken not in self._arrived:
                self._raise_if_it_cannot_come()
                if deadline is None:
                    return None
                self._shared.wait_until(self._has_next, deadline, peer=self._peer)
            chunk = self._arrived.pop(self._taken)
        slot = self._ring.slot(self._taken)[: chunk.nbytes]
        self._taken += 1
        return chunk, slot

    def release(self) -> None:
        with self._shared.changed:
            self._released += 1
            self._shared.changed.notify_all()

    def refuse(self, reason: str) -> None:
        refuse(self._connections[0], reason)

    def close(self) -> None:
        if not self._shared.closed:
            self._shut()

    def _has_next(self) -> bool:
        if self._taken in self._arrived:
            return True
        self._raise_if_it_cannot_come()
        return False

    def _raise_if_it_cannot_come(self) -> None:
        """Called with the condition held."""
        self._shared.raise_if_over()
        # The end of one connection is no loss while another may still bring the chunk.
        held_up = sum(not self._fits(number) for number in self._waiting)
        if self._ended_streams and self._ended_streams + held_up == len(self._connections):
            raise self._end_of_peer(ConnectionError("end of stream"))

    def _fits(self, number: int) -> bool:
        return number - self._released < self._ring.shape.slots

    def _serve(self, connection: socket.socket) -> None:
        while (frame := receive_frame(connection)) is not None:
            if frame.nbytes > self.slot_bytes:
                raise ValueError(f"a chunk of {frame.nbytes} bytes does not fit a slot")
            if not self._await_slot(frame.number):
                return
            receive_into(connection, self._ring.view(frame.number, frame.nbytes))
            with self._shared.changed:
                _, header, offset, nbytes, checksum = frame
                self._arrived[frame.number] = Chunk(header, offset, nbytes, checksum)
                self._shared.changed.notify_all()
        with self._shared.changed:
            self._ended_streams += 1
            self._shared.changed.notify_all()

    def _await_slot(self, number: int) -> bool:
        """False when the link has ended in the meantime."""
        with self._shared.changed:
            if self._fits(number):
                return True
            self._waiting.append(number)
            self._shared.changed.notify_all()
            while not self._fits(number):
                if self._shared.closed or self._shared.error is not None:
                    return False
                self._shared.changed.wait()
            self._waiting.remove(number)
        return True
