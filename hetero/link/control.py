"""Control connections: messages between the ends of a link that must survive the loss of a rail.

The ends have authenticated each other over them. When all are closed, the peer has ended.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hetero.link.handshake import send_json
from hetero.startup.addresses import is_unreachable, keep_alive

_LENGTH = struct.Struct("<I")
_SEND_TIMEOUT = struct.pack("ll", 5, 0)
"""A `struct timeval`. With a timeout of Python's, `recv` would wait too."""


class PathsLost(ConnectionError):
    """The peer's host does not answer over any path; the peer itself may still run."""


class Control:
    """JSON messages to and from the peer, over one connection for each network path.

    Each message is sent over every connection that is left, and duplicates are dropped, so it
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
        """Wait until some connections can be read, for so many seconds at most."""
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
