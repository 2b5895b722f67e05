"""Liveness on rank 0: a connection to every other rank, and reports of failures to all."""

from __future__ import annotations

import hmac
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from hetero.addresses import is_unreachable, keep_alive, listen_everywhere
from hetero.forked_children import call_in_children
from hetero.liveness.liveness import (
    ACK_SECONDS,
    HEARTBEAT,
    Liveness,
    RankFailure,
    clock,
    encode,
    try_send,
)

_LONGEST_GREETING = 1024
_ACCEPT_PAUSE_SECONDS = 0.1
_LEAVE_PAUSE_SECONDS = 0.01


@dataclass(eq=False)
class _Client:
    """One connection."""

    connection: socket.socket
    rank: int | None = None
    """None until it has shown this job's token."""
    last_heard: float = 0.0
    unread: bytes = b""


class LivenessServer(Liveness):
    """One thread that polls the listener and all connections."""

    def __init__(
        self,
        *,
        world_size: int,
        token: str,
        present: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """`present` returns the hosts of the ranks that have opened the store."""
        super().__init__(world_size)
        self._token, self._host, self._present = token, socket.gethostname(), present
        self._others = world_size - 1
        self._gone: set[int] = set()
        """The ranks that have left or ended."""
        self._stopped = threading.Event()
        self._first_seen: dict[int, float] = {}
        self._clients: set[_Client] = set()
        self._last_poll = time.monotonic()
        self._lock = threading.Lock()
        self._listener = listen_everywhere(backlog=min(world_size, 4096))
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        call_in_children(self, LivenessServer._close_all)
        threading.Thread(target=self._run, name="liveness", daemon=True).start()

    def fail(self, reason: str) -> None:
        self._report(RankFailure(0, self._host, reason, clock(), 0.0))

    def leave(self, seconds: float = 0.0) -> None:
        self._closed.set()
        self._broadcast({"closed": True})
        deadline = time.monotonic() + seconds
        while len(self._gone) < self._others and time.monotonic() < deadline:
            time.sleep(_LEAVE_PAUSE_SECONDS)
        self._stopped.set()

    def heartbeat_ages(self) -> dict[int, float]:
        with self._lock:
            ages = {c.rank: self._last_poll - c.last_heard for c in self._clients}
        return {rank: max(0.0, age) for rank, age in ages.items() if rank is not None}

    def never_connected(self, seconds: float) -> set[int]:
        now = time.monotonic()
        present = self._present()
        for rank in present:
            self._first_seen.setdefault(rank, now)
        missing = present.keys() - self._hosts.keys() - {0}
        lost = {rank for rank in missing if now - self._first_seen[rank] >= seconds}
        self._hosts |= {rank: present[rank] for rank in lost}
        return lost

    def _query_silent(self) -> dict[int, float]:
        return self.silent()

    def _run(self) -> None:
        while not self._stopped.is_set():
            polled = time.monotonic()
            for ready, _ in self._selector.select(self._interval):
                if ready.data is None:
                    self._accept()
                else:
                    self._receive(ready.data)
            # Everything that arrived before has been read: never count a pause of this process as
            # silence of another.
            self._last_poll = polled
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # No more files can be opened. The caller times out by itself.
            time.sleep(_ACCEPT_PAUSE_SECONDS)
            return
        with suppress(OSError):
            connection.setblocking(False)
            keep_alive(connection, ack_timeout=ACK_SECONDS)
            client = _Client(connection, last_heard=time.monotonic())
            with self._lock:
                self._clients.add(client)
            self._selector.register(connection, selectors.EVENT_READ, client)

    def _receive(self, client: _Client) -> None:
        try:
            data = client.connection.recv(1 << 12)
        except BlockingIOError:
            return
        except OSError as error:
            self._on_disconnect(client, is_unreachable=is_unreachable(error))
            return
        if not data:
            self._on_disconnect(client)
            return
        client.last_heard = time.monotonic()
        *messages, client.unread = (client.unread + data).split(b"\n")
        for message in messages:
            if client.connection.fileno() >= 0:
                self._handle(client, message)
        if client.rank is None and len(client.unread) > _LONGEST_GREETING:
            self._drop(client)

    def _handle(self, client: _Client, data: bytes) -> None:
        if not data:
            try_send(client.connection, HEARTBEAT)
            return
        try:
            message = json.loads(data)
            if client.rank is None:
                self._admit(client, message)
            elif "failed" in message:
                host, reason = self._hosts[client.rank], str(message["failed"])
                self._report(RankFailure(client.rank, host, reason, clock(), 0.0))
            elif "leave" in message:
                self._drop(client)
            elif "ask" in message:
                ages = {str(rank): age for rank, age in self._query_silent().items()}
                try_send(client.connection, encode({"silent": ages}))
        except (ValueError, KeyError, TypeError, RecursionError):
            # Not a rank of this job, but for example a port scanner.
            self._drop(client)

    def _admit(self, client: _Client, greeting: Mapping[str, Any]) -> None:
        if not hmac.compare_digest(str(greeting["token"]), self._token):
            raise ValueError("it is of another job")
        rank = int(greeting["rank"])
        if any(other.rank == rank for other in self._clients):
            raise ValueError("another process has this rank, as of a job started twice")
        self._hosts[rank] = str(greeting["host"])
        with self._lock:
            try_send(client.connection, encode({"welcome": True, "host": self._host}))
            client.rank = rank
        # What was broadcast before this rank connected.
        if self._failure is not None:
            try_send(client.connection, encode({"failure": asdict(self._failure)}))
        if self._closed.is_set():
            try_send(client.connection, encode({"closed": True}))

    def _on_disconnect(self, client: _Client, *, is_unreachable: bool = False) -> None:
        self._drop(client)
        if client.rank is not None:
            self._report_end(client.rank, client.last_heard, is_unreachable=is_unreachable)

    def _drop(self, client: _Client) -> None:
        if client not in self._clients:
            return
        with self._lock:
            self._clients.remove(client)
        self._selector.unregister(client.connection)
        client.connection.close()
        if client.rank is not None:
            self._gone.add(client.rank)

    def _report(self, failure: RankFailure) -> None:
        super()._report(failure)
        if not self._closed.is_set():
            self._broadcast({"failure": asdict(failure)})

    def _broadcast(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            for client in self._clients:
                if client.rank is not None:
                    try_send(client.connection, encode(message))

    def _close_all(self) -> None:
        for connection in (self._listener, *(c.connection for c in self._clients)):
            connection.close()
