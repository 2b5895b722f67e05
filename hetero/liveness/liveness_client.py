"""Liveness on every rank but 0: one connection to rank 0, opened and read by a thread."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from hetero.addresses import (
    PORT_RANGE,
    is_loopback,
    is_unreachable,
    keep_alive,
    plain_address,
)
from hetero.errors import UserError
from hetero.forked_children import close_in_children
from hetero.liveness.liveness import (
    ACK_SECONDS,
    HEARTBEAT,
    Liveness,
    RankFailure,
    ServerAddress,
    encode,
)

_CONNECT_SECONDS = 20.0


class LivenessClient(Liveness):
    """Waits for rank 0 to start, connects and receives, all in one thread."""

    def __init__(
        self, find_server: Callable[[], ServerAddress], *, rank: int, world_size: int
    ) -> None:
        """`find_server` waits until rank 0 has published its address."""
        super().__init__(world_size)
        self._rank = rank
        self._connection: socket.socket | None = None
        self._last_heard, self._unread = 0.0, b""
        self._unanswered_since: float | None = None
        """When the first heartbeat was sent that rank 0 has not answered."""
        self._last_poll = 0.0
        self._connect_tried, self._replied = threading.Event(), threading.Event()
        self._silent: dict[int, float] = {}
        self._thread = threading.Thread(
            target=self._run, args=(find_server,), name="liveness", daemon=True
        )
        self._thread.start()

    def fail(self, reason: str) -> None:
        self._send({"failed": reason})

    def leave(self, seconds: float = 0.0) -> None:
        self._thread.join(seconds)  # It ends when rank 0 has left or ended, or cannot be reached.
        self._closed.set()
        self._send({"leave": True})

    def await_connection(self) -> None:
        if not self._connect_tried.wait(2 * _CONNECT_SECONDS):
            raise UserError(f"{socket.gethostname()} has not found rank 0; see rank 0's log")
        if self.unreachable is not None:
            raise UserError(self.unreachable)

    def heartbeat_ages(self) -> dict[int, float]:
        # Measure from the unanswered heartbeat to the last poll, and not from `_last_heard` to now:
        # never count a pause of this process as rank 0's silence.
        since = self._unanswered_since
        age = 0.0 if since is None else self._last_poll - since
        return {} if self._connection is None else {0: max(0.0, age)}

    def _query_silent(self) -> dict[int, float]:
        if silent := self.silent():  # rank 0 itself, which would not reply
            return silent
        self._replied.clear()
        self._send({"ask": True})
        self._replied.wait(1.0)
        return self._silent

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._connection is not None:
            with suppress(OSError):
                self._connection.sendall(encode(message))

    def _run(self, find_server: Callable[[], ServerAddress]) -> None:
        try:
            server = find_server()
        except Exception:  # the store is gone, which the main thread notices and reports too
            return
        try:
            self._connection = self._connect(server)
        except OSError as error:
            self.unreachable = (
                f"{socket.gethostname()} cannot reach rank 0 at {server.host}, port {server.port} "
                f"({error}); see whether rank 0 has ended, and open the ports between the nodes "
                f"({PORT_RANGE}), which links and gloo need too"
            )
        self._connect_tried.set()
        if self._connection is not None:
            if self._closed.is_set():
                self._send({"leave": True})
            self._receive_loop(self._connection)

    def _connect(self, server: ServerAddress) -> socket.socket:
        connection = socket.create_connection((server.host, server.port), timeout=_CONNECT_SECONDS)
        keep_alive(connection, ack_timeout=ACK_SECONDS)
        local, remote = connection.getsockname()[0], connection.getpeername()[0]
        host = socket.gethostname()
        connection.sendall(encode({"token": server.token, "rank": self._rank, "host": host}))
        reply = b""
        while b"\n" not in reply and (data := connection.recv(1 << 12)):
            reply += data
        reply, _, self._unread = reply.partition(b"\n")
        if b"welcome" not in reply:
            connection.close()
            raise ConnectionError("it was answered by something that is not this job's rank 0")
        self._hosts[0] = str(json.loads(reply)["host"])
        self.address = plain_address(local)
        self.is_elsewhere = local != remote and not is_loopback(plain_address(remote))
        self._last_heard = time.monotonic()
        close_in_children(connection)
        return connection

    def _receive_loop(self, connection: socket.socket) -> None:
        data, unreachable = b"", False
        while not self._closed.is_set():
            *messages, self._unread = (self._unread + data).split(b"\n")
            for message in filter(None, messages):
                self._handle(json.loads(message))
            data = b""
            try:
                if wait([connection], self._interval):
                    data = connection.recv(1 << 16)
                    if not data:
                        break
                    self._last_heard, self._unanswered_since = time.monotonic(), None
                else:
                    self._last_poll = time.monotonic()
                    self._unanswered_since = self._unanswered_since or self._last_poll
                    connection.sendall(HEARTBEAT)
            except (OSError, ValueError) as error:
                unreachable = isinstance(error, OSError) and is_unreachable(error)
                break
        self._report_end(0, self._last_heard, is_unreachable=unreachable)

    def _handle(self, message: Mapping[str, Any]) -> None:
        if "failure" in message:
            self._report(RankFailure(**message["failure"]))
        elif "closed" in message:
            self._closed.set()
        elif "silent" in message:
            self._silent = {int(rank): float(age) for rank, age in message["silent"].items()}
            self._replied.set()
