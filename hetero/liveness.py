"""Which ranks of a run are there: rank 0 holds a connection to each, and tells all when one ends.

The kernel closes a process's connection when the process ends, however it ends, so rank 0 knows at
once and nobody has to guess from what fails afterwards. Over the same connection each rank beats
now and then, which says when one was last heard that is there and does nothing. Silence alone ends
nobody. The connection also shows which of its addresses a rank reaches the others by.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from hetero.errors import HeteroError

_BEAT_SECONDS = 2.0
_BEATS_A_SECOND = 256
"""As many rank 0 reads at most, from all others."""
_CALL_SECONDS = 20.0
_GRACE_SECONDS = 5.0
"""For a rank to fail by itself, with what it was doing, after another has ended."""
_BEAT = b"\n"
_LONGEST_GREETING = 1024
_PAUSE_SECONDS = 0.1


class RankLost(HeteroError):
    """Another rank has ended before the run has."""


@dataclass(frozen=True)
class Ended:
    """What rank 0 says of a rank that is no more."""

    rank: int
    reason: str
    """Its own words, or empty for one that ended without any."""
    last_heard: str
    """The time of day, by rank 0's clock."""
    silent_for: float
    """Seconds since then, when its end was noticed."""

    def sentence(self, names: Mapping[int, str]) -> str:
        who = names.get(self.rank, f"rank {self.rank}")
        if self.reason:
            return f"{who} failed: {self.reason}"
        heard = f"last heard at {self.last_heard}, {self.silent_for:.1f} s before that was noticed"
        return f"{who} has ended without a word ({heard}); see its log"


class Liveness(ABC):
    """One rank's side. Rank 0 is a Hub, the others are Members."""

    def __init__(self) -> None:
        self._names: Mapping[int, str] = {}
        self._first: Ended | None = None
        self._noticed, self._over = threading.Event(), threading.Event()
        self._silent: dict[int, float] = {}

    def name_ranks(self, names: Mapping[int, str]) -> None:
        """What people know the ranks by: 'rank 3 on b (stage 1)'."""
        self._names = names

    def end_with_others(self, end: Callable[[RankLost], None]) -> None:
        """Call `end`, from a thread, if this process goes on for long after another has ended."""

        def wait() -> None:
            self._noticed.wait()
            if not self._over.wait(_GRACE_SECONDS) and (cause := self.cause(0)) is not None:
                end(RankLost(cause))

        threading.Thread(target=wait, name="liveness end", daemon=True).start()

    def cause(self, seconds: float = 1.5) -> str | None:
        """Who ended first, or else who is silent, in a sentence; waits so long for the news."""
        self._noticed.wait(seconds)
        if self._first is not None:
            return self._first.sentence(self._names)
        silent = self._ask_for_silent()
        if not silent:
            return None
        rank = max(silent, key=lambda rank: silent[rank])
        who = self._names.get(rank, f"rank {rank}")
        return f"{who} was last heard {silent[rank]:.0f} s ago; see whether it, or its host, hangs"

    @abstractmethod
    def fail(self, reason: str) -> None:
        """Tell the others why this rank ends."""

    @abstractmethod
    def leave(self) -> None:
        """This rank's end is none to speak of from here on: all have come to the end."""

    @abstractmethod
    def _ask_for_silent(self) -> dict[int, float]:
        """The ranks of which nothing has been heard for a while, and for how many seconds."""

    def _notice(self, ended: Ended) -> None:
        if self._first is None:
            self._first = ended
        self._noticed.set()


@dataclass
class _Line:
    """What rank 0 knows of one connection."""

    connection: socket.socket
    rank: int | None = None
    heard: float = 0.0
    unread: bytes = b""


class Hub(Liveness):
    """Rank 0's side: a thread that sleeps until something comes."""

    def __init__(self, *, world_size: int, token: str, patience: float) -> None:
        """`patience` is how many seconds a host may answer nothing before its ranks have ended."""
        super().__init__()
        self._token, self._patience = token, patience
        self._silence = 3 * _interval(world_size)
        self._lines: dict[int, _Line] = {}
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
        self._tell_of(Ended(0, reason, _clock(), 0.0))

    def leave(self) -> None:
        self._over.set()
        self._broadcast({"over": True})
        self._wake.send(b"x")

    def _ask_for_silent(self) -> dict[int, float]:
        now = time.monotonic()
        with self._lock:
            ages = {line.rank: now - line.heard for line in self._lines.values()}
        return {rank: age for rank, age in ages.items() if rank is not None and age > self._silence}

    def _run(self) -> None:
        while not self._over.is_set():
            for descriptor, _ in self._poll.poll():
                if descriptor == self._listener.fileno():
                    self._accept()
                elif descriptor in self._lines:
                    self._hear(self._lines[descriptor])
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
            _keep_alive(connection, self._patience)
            with self._lock:
                self._lines[connection.fileno()] = _Line(connection, heard=time.monotonic())
            self._poll.register(connection.fileno(), select.EPOLLIN)

    def _hear(self, line: _Line) -> None:
        try:
            part = line.connection.recv(1 << 12)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._lose(line)
            return
        line.heard = time.monotonic()
        *whole, line.unread = (line.unread + part).split(b"\n")
        for text in whole:
            if line.connection.fileno() >= 0:
                self._obey(line, text)
        if line.rank is None and len(line.unread) > _LONGEST_GREETING:
            self._forget(line)

    def _obey(self, line: _Line, text: bytes) -> None:
        if not text:
            _send(line.connection, _BEAT)
            return
        try:
            said = json.loads(text)
            if line.rank is None:
                if not hmac.compare_digest(str(said["token"]), self._token):
                    raise ValueError("it is of another job")
                line.rank = int(said["rank"])
                _send(line.connection, _packed({"welcome": True}))
            elif "failed" in said:
                self._tell_of(Ended(line.rank, str(said["failed"]), _clock(), 0.0))
            elif "leave" in said:
                self._forget(line)
            elif "ask" in said:
                ages = {str(rank): age for rank, age in self._ask_for_silent().items()}
                _send(line.connection, _packed({"silent": ages}))
        except (ValueError, KeyError, TypeError):
            # A stranger, such as a port scanner.
            self._forget(line)

    def _lose(self, line: _Line) -> None:
        silent_for = time.monotonic() - line.heard
        self._forget(line)
        if line.rank is not None:
            self._tell_of(Ended(line.rank, "", _clock(silent_for), silent_for))

    def _forget(self, line: _Line) -> None:
        with self._lock:
            if self._lines.pop(line.connection.fileno(), None) is None:
                return
        self._poll.unregister(line.connection.fileno())
        line.connection.close()

    def _tell_of(self, ended: Ended) -> None:
        if not self._over.is_set():
            self._broadcast({"ended": asdict(ended)})
            self._notice(ended)

    def _broadcast(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            for line in self._lines.values():
                _send(line.connection, _packed(message))

    def _close_all(self) -> None:
        for connection in (self._listener, *(line.connection for line in self._lines.values())):
            connection.close()


class Member(Liveness):
    """The side of any other rank. Raises OSError where rank 0 cannot be reached."""

    def __init__(
        self, address: tuple[str, int], *, rank: int, world_size: int, token: str, patience: float
    ) -> None:
        super().__init__()
        self._interval = _interval(world_size)
        self._connection = socket.create_connection(address, timeout=_CALL_SECONDS)
        _keep_alive(self._connection, patience)
        self._answered = threading.Event()
        self.own_address = _plain(self._connection.getsockname()[0])
        self.hub_address = _plain(self._connection.getpeername()[0])
        self._connection.sendall(_packed({"token": token, "rank": rank}))
        welcome = self._connection.recv(1 << 12)
        if b"welcome" not in welcome:
            self._connection.close()
            raise ConnectionError("it was answered by something that is not this job's rank 0")
        os.register_at_fork(after_in_child=self._connection.close)
        threading.Thread(target=self._run, name="liveness", daemon=True).start()

    def fail(self, reason: str) -> None:
        self._say({"failed": reason})

    def leave(self) -> None:
        self._over.set()
        self._say({"leave": True})

    def _ask_for_silent(self) -> dict[int, float]:
        self._answered.clear()
        self._say({"ask": True})
        self._answered.wait(1.0)
        return self._silent

    def _say(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):
            self._connection.sendall(_packed(message))

    def _run(self) -> None:
        heard, unread = time.monotonic(), b""
        while not self._over.is_set():
            part = _BEAT
            try:
                if select.select([self._connection], [], [], self._interval)[0]:
                    part = self._connection.recv(1 << 16)
                    heard = time.monotonic() if part else heard
                else:
                    self._connection.sendall(_BEAT)
                    continue
            except (OSError, ValueError):
                part = b""
            if not part:
                break
            *whole, unread = (unread + part).split(b"\n")
            for text in filter(None, whole):
                self._obey(json.loads(text))
        if not self._over.is_set():
            silent_for = time.monotonic() - heard
            self._notice(Ended(0, "", _clock(silent_for), silent_for))

    def _obey(self, said: Mapping[str, Any]) -> None:
        if "ended" in said:
            self._notice(Ended(**said["ended"]))
        elif "over" in said:
            self._over.set()
        elif "silent" in said:
            self._silent = {int(rank): float(age) for rank, age in said["silent"].items()}
            self._answered.set()


def _interval(world_size: int) -> float:
    return max(_BEAT_SECONDS, world_size / _BEATS_A_SECOND)


def _listener(*, backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
        )
    return socket.create_server(("", 0), backlog=backlog)


def _keep_alive(connection: socket.socket, patience: float) -> None:
    """Have the kernel end it where the other host answers nothing for so many seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 5),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_USER_TIMEOUT, int(patience * 1000)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send(connection: socket.socket, data: bytes) -> None:
    # Its end, and a peer that reads nothing, show elsewhere.
    with suppress(OSError):
        connection.send(data)


def _packed(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _plain(address: str) -> str:
    """Without what marks an IPv4 address among IPv6 ones, or the interface."""
    return address.removeprefix("::ffff:").partition("%")[0]


def _clock(seconds_ago: float = 0.0) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds_ago))
