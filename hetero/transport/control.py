"""The connection beside a link's rails: what the ends must tell each other when rails fail.

It is the connection over which the ends have proved themselves. Its end is the peer's end.
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
    """Whole messages over a stream; reading never waits for the rest of one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unread = bytearray()
        connection.settimeout(_SEND_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises OSError when the peer is gone or takes nothing."""
        send_json(self._connection, message)

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come whole. Raises ConnectionError at the connection's end."""
        try:
            part = self._connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not part:
            raise ConnectionError("the peer closed the connection")
        self._unread += part
        messages = []
        while len(self._unread) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread)
            end = _LENGTH.size + length
            if len(self._unread) < end:
                break
            messages.append(dict(json.loads(self._unread[_LENGTH.size : end])))
            del self._unread[:end]
        return messages

    def close(self) -> None:
        self._connection.close()
