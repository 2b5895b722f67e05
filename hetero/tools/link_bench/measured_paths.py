"""What can be measured: a link of ours, or plain sockets, behind one small interface.

Both processes hold one end each. Every method that receives returns once the bytes are really
there: on a GPU after a synchronisation, because a link's `wait` may only order the stream.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch
import torch.distributed as dist

from hetero.link.base import Link
from hetero.startup.exchange import Exchange

# Within a host small buffers are the faster ones: what is in flight stays in the cache.
_SOCKET_BUFFER = 256 << 10


class Path(ABC):
    """One end of something that carries tensors both ways, in order."""

    name: str
    device: torch.device
    """Where the tensors lie."""

    @abstractmethod
    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor; may return before it has left. It must not change meanwhile."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor) -> None:
        """Receive the next message into a tensor; returns when it is there."""

    @abstractmethod
    def exchange(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Send and receive at once; returns when both have ended."""

    @abstractmethod
    def send_all(self, tensor: torch.Tensor, count: int) -> None:
        """Send a tensor so many times, back to back, and wait for all once."""

    @abstractmethod
    def recv_all(self, tensor: torch.Tensor, count: int) -> None:
        """Receive so many messages into one tensor, back to back, and wait for all once."""

    @abstractmethod
    def close(self) -> None:
        """Release what the path holds."""


def synchronize(device: torch.device) -> None:
    """Wait for the device as fast as can be; its driver may spin."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def blocking_synchronize(device: torch.device) -> None:
    """Wait for the current stream asleep, so that waiting costs no CPU time."""
    if device.type == "cuda":
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        event.synchronize()


class LinkPath(Path):
    """A link of ours, over any transport."""

    def __init__(self, name: str, link: Link, device: torch.device) -> None:
        self.name, self.device = name, device
        self.link = link
        self.wait_for_device: Callable[[torch.device], None] = synchronize

    def send(self, tensor: torch.Tensor) -> None:
        self.link.send(tensor)

    def recv(self, tensor: torch.Tensor) -> None:
        self.link.recv(tensor).wait()
        self._arrive()

    def exchange(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        sent, received = self.link.send(ours), self.link.recv(theirs)
        received.wait()
        sent.wait()
        self._arrive()

    def send_all(self, tensor: torch.Tensor, count: int) -> None:
        for transfer in [self.link.send(tensor) for _ in range(count)]:
            transfer.wait()

    def recv_all(self, tensor: torch.Tensor, count: int) -> None:
        for transfer in [self.link.recv(tensor) for _ in range(count)]:
            transfer.wait()
        self._arrive()

    def close(self) -> None:
        self.link.close()

    def _arrive(self) -> None:
        self.wait_for_device(self.device)
        # A link that only orders streams may learn of a failure after its `wait`.
        self.link.check()


class SocketPath(Path):
    """The bare limit of TCP: a loop of `sendall` and `recv_into`, a message cut over connections.

    With one connection the calling thread does it all, but for sending while it receives.
    """

    def __init__(self, name: str, connections: Sequence[socket.socket]) -> None:
        self.name, self.device = name, torch.device("cpu")
        self._connections = connections
        self._senders = ThreadPoolExecutor(len(connections), "bare send")
        self._receivers = ThreadPoolExecutor(len(connections), "bare recv")

    def send(self, tensor: torch.Tensor) -> None:
        self._move(tensor, 1, _send, self._senders)

    def recv(self, tensor: torch.Tensor) -> None:
        self._move(tensor, 1, _receive, self._receivers)

    def exchange(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        parts = zip(self._connections, self._parts(ours), strict=True)
        sending = [self._senders.submit(_send, *part, 1) for part in parts]
        self.recv(theirs)
        for future in sending:
            future.result()

    def send_all(self, tensor: torch.Tensor, count: int) -> None:
        self._move(tensor, count, _send, self._senders)

    def recv_all(self, tensor: torch.Tensor, count: int) -> None:
        self._move(tensor, count, _receive, self._receivers)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._senders.shutdown()
        self._receivers.shutdown()

    def _move(
        self,
        tensor: torch.Tensor,
        count: int,
        step: Callable[[socket.socket, memoryview, int], None],
        threads: ThreadPoolExecutor,
    ) -> None:
        parts = self._parts(tensor)
        others = [
            threads.submit(step, connection, part, count)
            for connection, part in zip(self._connections[1:], parts[1:], strict=True)
        ]
        step(self._connections[0], parts[0], count)
        for future in others:
            future.result()

    def _parts(self, tensor: torch.Tensor) -> list[memoryview]:
        """One piece of the message for each connection."""
        view = tensor.numpy().data
        count = len(self._connections)
        bounds = [len(view) * index // count for index in range(count + 1)]
        return [view[begin:end] for begin, end in pairwise(bounds)]


def open_sockets(
    name: str,
    *,
    rank: int,
    connections: int,
    store: dist.Store,
    timeout: float,
    address: str = "127.0.0.1",
) -> SocketPath:
    """Connect the two processes, to an address of rank 0's. Collective between them."""
    ports = Exchange(store, "ports", member=rank, size=2)
    if rank == 0:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=connections) as listener:
            listener.settimeout(timeout)
            ports.run({"port": listener.getsockname()[1]}, timeout=timeout)
            opened = [listener.accept()[0] for _ in range(connections)]
    else:
        there = (address, ports.run(timeout=timeout)[0]["port"])
        # In turn, so that both ends hold them in one order.
        opened = [socket.create_connection(there, timeout) for _ in range(connections)]
    for connection in opened:
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
    return SocketPath(name, opened)


def _send(connection: socket.socket, part: memoryview, count: int) -> None:
    for _ in range(count):
        connection.sendall(part)


def _receive(connection: socket.socket, part: memoryview, count: int) -> None:
    for _ in range(count):
        done = 0
        while done < len(part):
            arrived = connection.recv_into(part[done:])
            if arrived == 0:
                raise ConnectionError("the other process closed the connection")
            done += arrived
