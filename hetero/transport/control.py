"""The connection beside a link's rails: what the ends must tell each other when rails fail.

Over it the ends have proved themselves. Its end is the peer's end.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from hetero.transport.handshake import send_json

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
    Reading never waits for the rest of a message.
    """

    def __init__(self, *connections: socket.socket) -> None:
        self._connections = list(connections)
        self._unread = {connection: bytearray() for connection in connections}
        self._sent = 0
        self._heard = 0
        for connection in connections:
            connection.settimeout(_SEND_SECONDS)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def filenos(self) -> list[int]:
        return [connection.fileno() for connection in self._connections]

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises OSError when the peer is gone or takes nothing."""
        self._sent += 1
        failures = []
        for connection in self._connections:
            try:
                send_json(connection, {"number": self._sent, **message})
            except OSError as error:
                failures.append(error)
        if len(failures) == len(self._connections):
            raise failures[0]

    def receive(self, descriptor: int) -> list[dict[str, Any]]:
        """What is new of the messages that have come whole over one connection.

        Raises ConnectionError where the peer has ended. A connection whose path is lost is left out
        from then on; it is an error only when it was the last.
        """
        connection = next(c for c in self._connections if c.fileno() == descriptor)
        try:
            part = connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except (ConnectionResetError, BrokenPipeError):
            raise
        except OSError as error:
            self._connections.remove(connection)
            connection.close()
            if not self._connections:
                raise ConnectionError("no path to the peer is left") from error
            return []
        if not part:
            raise ConnectionError("the peer closed the connection")
        return [message for message in self._whole(connection, part) if self._is_new(message)]

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
        for connection in self._connections:
            connection.close()
