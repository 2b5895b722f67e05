"""The side of every other rank than 0 in liveness: one connection to rank 0, opened by a thread."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from hetero.addresses import Way
from hetero.errors import UserError
from hetero.liveness.liveness import (
    HEARTBEAT,
    Ended,
    HubAddress,
    Liveness,
    clock,
    keep_alive,
    packed,
)

_CALL_SECONDS = 20.0


class Member(Liveness):
    """It waits for rank 0 to come, calls it, and listens, all in a thread of its own."""

    def __init__(self, find_hub: Callable[[], HubAddress], *, rank: int, world_size: int) -> None:
        """`find_hub` waits until rank 0 has said where it is."""
        super().__init__(world_size)
        self._rank = rank
        self._connection: socket.socket | None = None
        self._heard, self._unread = 0.0, b""
        self._unanswered: float | None = None
        """When the first heartbeat was sent that rank 0 has not answered yet."""
        self._looked = 0.0
        self._tried, self._answered = threading.Event(), threading.Event()
        self._silent: dict[int, float] = {}
        threading.Thread(target=self._live, args=(find_hub,), name="liveness", daemon=True).start()

    def fail(self, reason: str) -> None:
        self._say({"failed": reason})

    def leave(self) -> None:
        self._over.set()
        self._say({"leave": True})

    def await_connection(self) -> None:
        if not self._tried.wait(2 * _CALL_SECONDS):
            raise UserError(f"{socket.gethostname()} has not found rank 0; see rank 0's log")
        if self.unreachable is not None:
            raise UserError(self.unreachable)

    def seconds_since_heard(self) -> dict[int, float]:
        # Not since `_heard`, nor until now: a pause of this process is not rank 0's silence.
        since = self._unanswered
        age = 0.0 if since is None else self._looked - since
        return {} if self._connection is None else {0: max(0.0, age)}

    def _ask_for_silent(self) -> dict[int, float]:
        if silent := self.silent():  # rank 0, which therefore need not be asked
            return silent
        self._answered.clear()
        self._say({"ask": True})
        self._answered.wait(1.0)
        return self._silent

    def _say(self, message: Mapping[str, Any]) -> None:
        if self._connection is not None:
            with suppress(OSError):
                self._connection.sendall(packed(message))

    def _live(self, find_hub: Callable[[], HubAddress]) -> None:
        try:
            hub = find_hub()
        except Exception:  # the store is gone; the main thread meets the same and reports it
            return
        try:
            self._connection = self._call(hub)
        except OSError as error:
            self.unreachable = (
                f"{socket.gethostname()} cannot reach rank 0 at {hub.host}, port {hub.port} "
                f"({error}); see whether rank 0 has ended, and open the ports between the nodes, "
                "which links and gloo need too"
            )
        self._tried.set()
        if self._connection is not None:
            if self._over.is_set():
                self.leave()
            self._listen(self._connection)

    def _call(self, hub: HubAddress) -> socket.socket:
        connection = socket.create_connection((hub.host, hub.port), timeout=_CALL_SECONDS)
        keep_alive(connection)
        own, other = connection.getsockname()[0], connection.getpeername()[0]
        host = socket.gethostname()
        connection.sendall(packed({"token": hub.token, "rank": self._rank, "host": host}))
        answer = b""
        while b"\n" not in answer and (data := connection.recv(1 << 12)):
            answer += data
        answer, _, self._unread = answer.partition(b"\n")
        if b"welcome" not in answer:
            connection.close()
            raise ConnectionError("it was answered by something that is not this job's rank 0")
        self._hosts[0] = str(json.loads(answer)["host"])
        self.way = Way(_plain(own), _plain(other))
        self._heard = time.monotonic()
        os.register_at_fork(after_in_child=connection.close)
        return connection

    def _listen(self, connection: socket.socket) -> None:
        data = b""
        while not self._over.is_set():
            *whole, self._unread = (self._unread + data).split(b"\n")
            for text in filter(None, whole):
                self._obey(json.loads(text))
            data = b""
            try:
                if select.select([connection], [], [], self._interval)[0]:
                    data = connection.recv(1 << 16)
                    if not data:
                        break
                    self._heard, self._unanswered = time.monotonic(), None
                else:
                    self._looked = time.monotonic()
                    self._unanswered = self._unanswered or self._looked
                    connection.sendall(HEARTBEAT)
            except (OSError, ValueError):
                break
        if not self._over.is_set():
            silent_for = time.monotonic() - self._heard
            self._notice(Ended(0, self._hosts[0], "", clock(silent_for), silent_for))

    def _obey(self, said: Mapping[str, Any]) -> None:
        if "ended" in said:
            self._notice(Ended(**said["ended"]))
        elif "over" in said:
            self._over.set()
        elif "silent" in said:
            self._silent = {int(rank): float(age) for rank, age in said["silent"].items()}
            self._answered.set()


def _plain(address: str) -> str:
    """Without what marks an IPv4 address among IPv6 ones, or the interface."""
    return str(address).removeprefix("::ffff:").partition("%")[0]
