"""Which ranks of a run are there: rank 0 holds a connection to each, and tells all when one ends.

The kernel closes a process's connection when the process ends, however it ends, so rank 0 knows at
once and nobody has to guess from what fails afterwards. Over the same connection each rank sends a
heartbeat now and then, which says when one was last heard that is there and does nothing. The
connection also shows which of its addresses a rank reaches the others by.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hetero.addresses import Way
from hetero.errors import HeteroError
from hetero.waiting import spans

HEARTBEAT = b"\n"
_HEARTBEAT_SECONDS = 2.0
_HEARTBEATS_A_SECOND = 256
"""As many rank 0 reads at most, from all others."""
_GRACE_SECONDS = 5.0
"""For a rank to fail by itself, with what it was doing, after another has ended."""
_LONGEST_SILENCE = 30.0
"""Seconds after which the kernel ends the connection to a host that answers nothing at all."""


class RankLost(HeteroError):
    """Another rank has ended before the run has."""


@dataclass(frozen=True)
class Ended:
    """What rank 0 says of a rank that is no more."""

    rank: int
    host: str
    reason: str
    """Its own words, or empty for one that ended without any."""
    last_heard: str
    """The time of day, by rank 0's clock."""
    silent_for: float
    """Seconds since then, when its end was noticed."""

    def sentence(self, who: str, *, during: str = "") -> str:
        """`who` names the rank; `during` is what the ranks did at the time, as ' while ...'."""
        if self.reason:
            return f"{who} failed{during}: {self.reason}"
        heard = f"last heard at {self.last_heard}, {self.silent_for:.1f} s before that was noticed"
        return f"{who} has ended without a word{during} ({heard}); see its log"


class Liveness(ABC):
    """One rank's side. Rank 0 is a Hub, the others are Members."""

    way: Way | None = None
    """How this rank reached rank 0, once it has; None for rank 0 itself."""
    unreachable: str | None = None
    """Why this rank has no connection to rank 0, in a sentence, if it has tried in vain."""

    def __init__(self, world_size: int) -> None:
        self._interval = heartbeat_interval(world_size)
        self._silence = 3 * self._interval
        self._names: Mapping[int, str] = {}
        self._hosts: dict[int, str] = {}
        self._first: Ended | None = None
        self._noticed, self._over = threading.Event(), threading.Event()

    def name_ranks(self, names: Mapping[int, str]) -> None:
        """What people know the ranks by: 'rank 3 on b (stage 1)'. Their hosts are known before."""
        self._names = names

    def name(self, ranks: Collection[int]) -> str:
        """Ranks with their hosts: 'rank 3 on b (stage 1)', 'ranks 8-15 on b, c'."""
        ordered = sorted(ranks)
        if len(ordered) == 1 and ordered[0] in self._names:
            return self._names[ordered[0]]
        where = ", ".join(dict.fromkeys(self._hosts[r] for r in ordered if r in self._hosts))
        return f"{spans(ordered)} on {where}" if where else spans(ordered)

    def end_with_others(self, end: Callable[[RankLost], None]) -> None:
        """Call `end`, from a thread, if this process goes on for long after another has ended."""

        def wait() -> None:
            self._noticed.wait()
            if not self._over.wait(_GRACE_SECONDS) and (cause := self.cause(0)) is not None:
                end(RankLost(cause))

        threading.Thread(target=wait, name="liveness end", daemon=True).start()

    def take_silence_for_an_end(self, seconds: float) -> None:
        """From now on: a rank that sends no heartbeat for so long (three at least) counts as ended.

        Where only some wait for a rank that hangs, nothing else would tell the others.
        """

        def watch() -> None:
            while not (self._noticed.wait(self._interval) or self._over.is_set()):
                for rank, age in self.silent(seconds).items():
                    reason = f"no heartbeat for {age:.0f} s; see whether it, or its host, hangs"
                    self._tell_of(Ended(rank, self._hosts[rank], reason, clock(age), age))

        threading.Thread(target=watch, name="liveness silence", daemon=True).start()

    @property
    def ended(self) -> Ended | None:
        """The rank that ended first, if one has."""
        return self._first

    def cause(self, seconds: float = 1.5) -> str | None:
        """Who ended first, or else who is silent, in a sentence; waits so long to be told."""
        self._noticed.wait(seconds)
        if self._first is not None:
            return self._first.sentence(self.name([self._first.rank]))
        silent = self._ask_for_silent()
        if not silent:
            return None
        rank = max(silent, key=lambda rank: silent[rank])
        who = self.name([rank])
        return f"{who} was last heard {silent[rank]:.0f} s ago; see whether it, or its host, hangs"

    def silent(self, seconds: float = 0.0) -> dict[int, float]:
        """Of `seconds_since_heard`, those of so many seconds, and of three heartbeats, or more."""
        longest = max(seconds, self._silence)
        return {rank: age for rank, age in self.seconds_since_heard().items() if age >= longest}

    @abstractmethod
    def seconds_since_heard(self) -> dict[int, float]:
        """Of the ranks that this one has a connection with: rank 0 all others, they rank 0.

        As of this side's last look, which is a heartbeat's interval ago at most.
        """

    def never_connected(self, seconds: float) -> set[int]:
        """The ranks that opened the store so long ago and have not called: rank 0 knows."""
        return set()

    def await_connection(self) -> None:
        """Wait until rank 0, which must have come, is reached. UserError where it cannot be."""
        return

    @abstractmethod
    def fail(self, reason: str) -> None:
        """Tell the others why this rank ends."""

    @abstractmethod
    def leave(self) -> None:
        """This rank's end is none to speak of from here on: all have come to the end."""

    @abstractmethod
    def _ask_for_silent(self) -> dict[int, float]:
        """The ranks of which nothing has been heard for a while, and for how many seconds."""

    def _tell_of(self, ended: Ended) -> None:
        if not self._over.is_set():
            self._notice(ended)

    def _notice(self, ended: Ended) -> None:
        if self._first is None:
            self._hosts.setdefault(ended.rank, ended.host)
            self._first = ended
        self._noticed.set()


@dataclass(frozen=True)
class HubAddress:
    """Where rank 0 listens, and what shows it that a caller is of this job."""

    host: str
    port: int
    token: str


def heartbeat_interval(world_size: int) -> float:
    """Seconds between two heartbeats of a rank."""
    return max(_HEARTBEAT_SECONDS, world_size / _HEARTBEATS_A_SECOND)


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel end it where the other host answers nothing for long."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 5),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_USER_TIMEOUT, int(_LONGEST_SILENCE * 1000)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def send_message(connection: socket.socket, message: Mapping[str, Any]) -> None:
    send(connection, packed(message))


def send(connection: socket.socket, data: bytes) -> None:
    # Its end, and a peer that reads nothing, show elsewhere.
    with suppress(OSError):
        connection.send(data)


def packed(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def clock(seconds_ago: float = 0.0) -> str:
    """The time of day."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds_ago))
