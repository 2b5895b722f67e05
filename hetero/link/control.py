"""The connections beside a link's rails, over which its ends tell each other what happened."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hetero.link.handshake import frame
from hetero.startup.addresses import is_unreachable, keep_alive

_LENGTH = struct.Struct("<I")
_SEND_SECONDS = 5.0
"""The time for a connection to accept what is sent over it."""


class PathsLost(ConnectionError):
    """The peer's host is unreachable over every path; the peer itself may still run."""


class PathsReset(ConnectionError):
    """Every path was reset; the peer may still run."""


class Control:
    """JSON messages to and from the peer, over one authenticated connection for each network path.

    Each message is sent over every connection that is left, and duplicates are dropped, so that it
    arrives even if a path is lost. The peer has ended when it says so, or when it has closed the
    last connection that is left. Nothing blocks but `close`.
    """

    def __init__(self, *connections: socket.socket, ack_timeout: float | None = None) -> None:
        """`ack_timeout`: seconds without a TCP acknowledgement that end a connection."""
        self._connections = list(connections)
        """By the number of their path."""
        self._peers = [str(connection.getpeername()[0]) for connection in connections]
        self._lost: set[int] = set()
        """The paths whose connection has ended."""
        self._send_errors: dict[int, OSError] = {}
        self._unread = {path: bytearray() for path in range(len(connections))}
        self._unsent = {path: bytearray() for path in range(len(connections))}
        self._accepted_at = dict.fromkeys(range(len(connections)), 0.0)
        """When a path last had nothing unsent, or accepted some of it."""
        self._ack_timeout = ack_timeout
        self._sent = 0
        self._last_received = 0
        for connection in connections:
            self._prepare(connection)

    def _prepare(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        keep_alive(connection, ack_timeout=self._ack_timeout)

    def replace(self, path: int, connection: socket.socket) -> None:
        """Take a new connection for a path; closes the one before. Not during another call."""
        self._prepare(connection)
        self._connections[path].close()
        self._connections[path] = connection
        self._unread[path], self._unsent[path] = bytearray(), bytearray()
        self._lost.discard(path)
        self._send_errors.pop(path, None)

    def is_path(self, path: int) -> bool:
        return 0 <= path < len(self._connections)

    def descriptor(self, path: int) -> int:
        return self._connections[path].fileno()

    def lost_paths(self) -> list[int]:
        return list(self._lost)

    def is_cut(self) -> bool:
        """Returns whether no connection is left."""
        return len(self._lost) == len(self._connections)

    def filenos(self) -> list[int]:
        return [self.descriptor(path) for path in self._paths()]

    def _paths(self) -> list[int]:
        return [path for path in range(len(self._connections)) if path not in self._lost]

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises OSError when no connection is left to send it over.

        What the kernel does not accept at once is left to `flush`. Not during another call.
        """
        self._sent += 1
        data = frame({"number": self._sent, **message})
        for path in self._sendable():
            if not self._unsent[path]:
                self._accepted_at[path] = time.monotonic()
            self._unsent[path] += data
        self.flush()
        if not self._sendable():
            raise ConnectionError("no path to the peer is left")

    def flush(self) -> bool:
        """Send what is left; returns whether nothing is. Not during another call."""
        left = [path for path in self._sendable() if not self._flush(path)]
        return not left

    def _sendable(self) -> list[int]:
        return [path for path in self._paths() if path not in self._send_errors]

    def _flush(self, path: int) -> bool:
        connection, unsent = self._connections[path], self._unsent[path]
        try:
            while unsent:
                del unsent[: connection.send(unsent)]
                self._accepted_at[path] = time.monotonic()
        except BlockingIOError:
            if time.monotonic() - self._accepted_at[path] < _SEND_SECONDS:
                return False
            self._stop_sending(path, ConnectionError(f"it took nothing for {_SEND_SECONDS:g} s"))
        except OSError as error:
            self._stop_sending(path, error)
        return True

    def _stop_sending(self, path: int, error: OSError) -> None:
        """`receive` then drops the connection, for this reason: the kernel tells it only once."""
        self._send_errors[path] = error
        self._unsent[path].clear()
        with suppress(OSError):
            self._connections[path].shutdown(socket.SHUT_RDWR)

    def receive(self, descriptor: int) -> list[dict[str, Any]]:
        """The new messages that are complete on one connection.

        Drops a connection that has ended, which is closed only once it is replaced, or with the
        others. If it was the last one raises PathsLost if the peer's host does not answer,
        PathsReset if the connection broke, and ConnectionError if the peer has closed it.
        """
        path = next(path for path in self._paths() if self.descriptor(path) == descriptor)
        try:
            data = self._connections[path].recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            self._drop(path, error)
            return []
        if not data:
            self._drop(path, self._send_errors.get(path))
            return []
        return [m for m in self._complete(path, data) if self._is_new(m)]

    def _drop(self, path: int, error: OSError | None) -> None:
        self._lost.add(path)
        self._send_errors.pop(path, None)
        if not self.is_cut():
            return
        if error is None:
            raise ConnectionError("the peer has ended")
        if is_unreachable(error):
            raise PathsLost(
                f"nothing answers at {', '.join(self._peers)} ({error.strerror}); see "
                "whether its host runs, and the network between"
            )
        raise PathsReset(f"its connection broke ({error.strerror or error})")

    def _is_new(self, message: dict[str, Any]) -> bool:
        if message["number"] <= self._last_received:
            return False
        self._last_received = message["number"]
        return True

    def _complete(self, path: int, data: bytes) -> list[dict[str, Any]]:
        unread = self._unread[path]
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
        """Say that this end is closing, and close. Waits until the kernel has accepted that."""
        with suppress(OSError):
            self.send({"closed": True})
        while not self.flush():
            poller = select.poll()  # select() refuses descriptors above 1023
            for path in self._sendable():
                if self._unsent[path]:
                    poller.register(self._connections[path], select.POLLOUT)
            poller.poll(1000 * _SEND_SECONDS)
        for connection in self._connections:
            connection.close()
