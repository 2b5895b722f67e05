"""The connections beside a link's rails: what the ends must tell each other when rails fail.

Over them the ends have proved themselves. Their end is the peer's end.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hetero.link.handshake import send_json

_LENGTH = struct.Struct("<I")
_SEND_SECONDS = 5.0
# A host that goes away without a word is noticed after about half a minute.
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 4),
)


class Control:
    """Whole messages to and from the peer, over one connection or several.

    Each message goes over every connection that is left, and counts once. So the ends can still
    tell each other of a rail that is lost when the connection on the same path is lost with it.
    The peer has ended when it says so, or when no connection is left. Reading never waits for the
    rest of a message.
    """

    def __init__(self, *connections: socket.socket, lost_after: float | None = None) -> None:
        """`lost_after` is how many seconds a connection may confirm nothing, if not for long."""
        self._connections = list(connections)
        self._unread = {connection: bytearray() for connection in connections}
        self._sent = 0
        self._heard = 0
        for connection in connections:
            connection.settimeout(_SEND_SECONDS)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            if lost_after is not None:
                connection.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(lost_after * 1000)
                )

    def filenos(self) -> list[int]:
        return [connection.fileno() for connection in self._connections]

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises OSError when the peer is gone or takes nothing."""
        self._sent += 1
        sent = False
        for connection in list(self._connections):
            try:
                send_json(connection, {"number": self._sent, **message})
                sent = True
            except OSError:
                # Part of it may have gone, so nothing can follow. `receive` leaves it out.
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        if not sent:
            raise ConnectionError("no path to the peer is left")

    def receive(self, descriptor: int) -> list[dict[str, Any]]:
        """What is new of the messages that have come whole over one connection.

        Raises ConnectionError where the peer has ended. A connection that has is left out from then
        on, and is closed only with the others.
        """
        connection = next(c for c in self._connections if c.fileno() == descriptor)
        try:
            part = connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            part = b""
        if not part:
            self._connections.remove(connection)
            if not self._connections:
                raise ConnectionError("the peer has ended, or no path to it is left")
            return []
        messages = [m for m in self._whole(connection, part) if self._is_new(m)]
        if any("closed" in message for message in messages):
            raise ConnectionError("the peer has closed the link")
        return messages

    def _is_new(self, message: dict[str, Any]) -> bool:
        if message["number"] <= self._heard:
            return False
        self._heard = message["number"]
        return True

    def _whole(self, connection: socket.socket, part: bytes) -> list[dict[str, Any]]:
        unread = self._unread[connection]
        unread += part
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
