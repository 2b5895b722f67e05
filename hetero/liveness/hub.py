"""Rank 0's side of liveness: it holds a connection to every other rank, and tells all of an end."""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from hetero.liveness.liveness import (
    HEARTBEAT,
    Ended,
    Liveness,
    clock,
    keep_alive,
    send,
    send_message,
)

_LONGEST_GREETING = 1024
_PAUSE_SECONDS = 0.1


@dataclass
class _Line:
    """What rank 0 knows of one connection."""

    connection: socket.socket
    rank: int | None = None
    """Once it has shown that it is of this job."""
    heard: float = 0.0
    unread: bytes = b""


class Hub(Liveness):
    """A thread that sleeps until something comes."""

    def __init__(
        self,
        *,
        world_size: int,
        token: str,
        present: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """`present` tells the ranks that have opened the store, with their hosts."""
        super().__init__(world_size)
        self._token, self._host, self._present = token, socket.gethostname(), present
        self._first_seen: dict[int, float] = {}
        self._lines: dict[int, _Line] = {}
        self._looked = time.monotonic()
        self._lock = threading.Lock()
        self._listener = _listener(backlog=min(world_size, 4096))
        self.port = int(self._listener.getsockname()[1])
        self._wake, self._woken = socket.socketpair()
        self._poll = select.epoll()
        for descriptor in (self._listener.fileno(), self._woken.fileno()):
            self._poll.register(descriptor, select.EPOLLIN)
        os.register_at_fork(after_in_child=self._close_all)
        threading.Thread(target=self._run, name="liveness", daemon=True).start()

    def fail(self, reason: str) -> None:
        self._tell_of(Ended(0, self._host, reason, clock(), 0.0))

    def leave(self) -> None:
        self._over.set()
        self._broadcast({"over": True})
        self._wake.send(b"x")

    def seconds_since_heard(self) -> dict[int, float]:
        with self._lock:
            ages = {line.rank: self._looked - line.heard for line in self._lines.values()}
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

    def _ask_for_silent(self) -> dict[int, float]:
        return self.silent()

    def _run(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            for descriptor, _ in self._poll.poll(self._interval, len(self._lines) + 2):
                if descriptor == self._listener.fileno():
                    self._accept()
                elif descriptor in self._lines:
                    self._hear(self._lines[descriptor])
            # What had come by then has been read: a pause of this process is nobody's silence.
            self._looked = began
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # No more files may be open, and who calls gives up by himself.
            time.sleep(_PAUSE_SECONDS)
            return
        with suppress(OSError):
            connection.setblocking(False)
            keep_alive(connection)
            with self._lock:
                self._lines[connection.fileno()] = _Line(connection, heard=time.monotonic())
            self._poll.register(connection.fileno(), select.EPOLLIN)

    def _hear(self, line: _Line) -> None:
        try:
            data = line.connection.recv(1 << 12)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(line)
            return
        line.heard = time.monotonic()
        *whole, line.unread = (line.unread + data).split(b"\n")
        for text in whole:
            if line.connection.fileno() >= 0:
                self._obey(line, text)
        if line.rank is None and len(line.unread) > _LONGEST_GREETING:
            self._forget(line)

    def _obey(self, line: _Line, text: bytes) -> None:
        if not text:
            send(line.connection, HEARTBEAT)
            return
        try:
            said = json.loads(text)
            if line.rank is None:
                self._welcome(line, said)
            elif "failed" in said:
                self._tell_of(
                    Ended(line.rank, self._hosts[line.rank], str(said["failed"]), clock(), 0.0)
                )
            elif "leave" in said:
                self._forget(line)
            elif "ask" in said:
                ages = {str(rank): age for rank, age in self._ask_for_silent().items()}
                send_message(line.connection, {"silent": ages})
        except (ValueError, KeyError, TypeError):
            # A stranger, such as a port scanner.
            self._forget(line)

    def _welcome(self, line: _Line, said: Mapping[str, Any]) -> None:
        if not hmac.compare_digest(str(said["token"]), self._token):
            raise ValueError("it is of another job")
        rank = int(said["rank"])
        self._hosts[rank] = str(said["host"])
        with self._lock:
            send_message(line.connection, {"welcome": True, "host": self._host})
            line.rank = rank
        if self._first is not None:  # It came too late to be told with the others.
            send_message(line.connection, {"ended": asdict(self._first)})

    def _lose(self, line: _Line) -> None:
        silent_for = time.monotonic() - line.heard
        self._forget(line)
        if line.rank is not None:
            host = self._hosts[line.rank]
            self._tell_of(Ended(line.rank, host, "", clock(silent_for), silent_for))

    def _forget(self, line: _Line) -> None:
        with self._lock:
            if self._lines.pop(line.connection.fileno(), None) is None:
                return
        self._poll.unregister(line.connection.fileno())
        line.connection.close()

    def _tell_of(self, ended: Ended) -> None:
        super()._tell_of(ended)
        if not self._over.is_set():
            self._broadcast({"ended": asdict(ended)})

    def _broadcast(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            for line in self._lines.values():
                if line.rank is not None:
                    send_message(line.connection, message)

    def _close_all(self) -> None:
        for connection in (self._listener, *(line.connection for line in self._lines.values())):
            connection.close()


def _listener(*, backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
        )
    return socket.create_server(("", 0), backlog=backlog)
