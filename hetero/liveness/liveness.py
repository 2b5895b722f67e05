"""Which ranks of a run are alive: rank 0 holds a connection to each, and tells all when one fails.

The kernel closes a process's connection whenever the process ends, so rank 0 knows at once, and
nobody has to guess from what fails afterwards. Over the same connection each rank sends heartbeats,
which show whether a process that exists also responds. The connection also shows which of its
addresses a rank reaches the others by.
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

from hetero.errors import AgreedFailure
from hetero.formatting import ranks_on_hosts

HEARTBEAT = b"\n"
_HEARTBEAT_SECONDS = 2.0
_HEARTBEATS_A_SECOND = 256
"""The most that rank 0 reads, from all others together."""
_GRACE_SECONDS = 5.0
"""For a rank to fail by itself, with an error of its own, after another has failed."""
_SILENT_REMEDY = "see whether it, or its host, hangs, and the network between"
ACK_SECONDS = 30.0
"""After which the kernel closes the connection to a host that does not respond."""


@dataclass(frozen=True)
class RankFailure:
    """What rank 0 tells all others of a rank that has failed."""

    rank: int
    host: str
    reason: str
    """The rank's own error; empty if it ended without reporting one."""
    last_heard: str
    """The time of day, by rank 0's clock."""
    silent_for: float
    """Seconds from then until its end was noticed."""
    is_unreachable: bool = False
    """Whether all that is known is that its host answers nothing."""

    def sentence(self, who: str, *, during: str = "") -> str:
        """`who` names the rank; `during` is what the ranks did at the time, as ' while ...'."""
        if self.reason:
            return f"{who} failed{during}: {self.reason}"
        heard = f"last heard at {self.last_heard}, {self.silent_for:.1f} s before that was noticed"
        if self.is_unreachable:
            return (
                f"{who} cannot be reached any more{during} ({heard}); see whether its host runs, "
                "and the network between"
            )
        return f"{who} has ended without a word{during} ({heard}); see its log"


class Liveness(ABC):
    """One rank's side: rank 0's is a LivenessServer, the others' are LivenessClients."""

    address = "127.0.0.1"
    """This rank's end of its connection to rank 0."""
    is_elsewhere = False
    """Whether that connection leads to another host."""
    unreachable: str | None = None
    """Why this rank could not connect to rank 0, in a sentence."""

    def __init__(self, world_size: int) -> None:
        self._interval = heartbeat_interval(world_size)
        self._shortest_timeout = 3 * self._interval
        self._names: Mapping[int, str] = {}
        self._hosts: dict[int, str] = {}
        self._failure: RankFailure | None = None
        self._failed, self._closed = threading.Event(), threading.Event()

    def set_names(self, names: Mapping[int, str]) -> None:
        """How errors name the ranks, as 'rank 3 on b (stage 1)'; by rank and host without it."""
        self._names = names

    def name(self, ranks: Collection[int]) -> str:
        """Ranks with their hosts: 'rank 3 on b (stage 1)', 'ranks 8-15 on b, c'."""
        ordered = sorted(ranks)
        if len(ordered) == 1 and ordered[0] in self._names:
            return self._names[ordered[0]]
        return ranks_on_hosts(ordered, self._hosts)

    def on_failure(self, abort: Callable[[AgreedFailure], None]) -> None:
        """Call `abort`, from a thread, if this process still runs 5 s after another's failure."""

        def wait() -> None:
            self._failed.wait()
            if not self._closed.wait(_GRACE_SECONDS) and (cause := self.cause(0)) is not None:
                abort(AgreedFailure(cause, known_to_all=False))

        threading.Thread(target=wait, name="liveness abort", daemon=True).start()

    def set_heartbeat_timeout(self, seconds: float) -> None:
        """From now on, a rank without a heartbeat for so long (three at least) counts as failed.

        Without it, if only some ranks wait for one that hangs, the others do not learn of it.
        """

        def watch() -> None:
            while not (self._failed.wait(self._interval) or self._closed.is_set()):
                for rank, age in self.silent(seconds).items():
                    reason = f"no heartbeat for {age:.0f} s; {_SILENT_REMEDY}"
                    self._report(RankFailure(rank, self._hosts[rank], reason, clock(age), age))

        threading.Thread(target=watch, name="liveness timeout", daemon=True).start()

    @property
    def failure(self) -> RankFailure | None:
        """The first failure of a rank, if there is one."""
        return self._failure

    def cause(self, seconds: float = 1.5) -> str | None:
        """Which rank failed first, or else is silent, in a sentence. Waits up to `seconds`."""
        self._failed.wait(seconds)
        if self._failure is not None:
            return self._failure.sentence(self.name([self._failure.rank]))
        silent = self._query_silent()
        if not silent:
            return None
        rank = max(silent, key=lambda rank: silent[rank])
        who = self.name([rank])
        return f"{who} was last heard {silent[rank]:.0f} s ago; {_SILENT_REMEDY}"

    def silent(self, seconds: float = 0.0) -> dict[int, float]:
        """The `heartbeat_ages` of at least `seconds`, and of at least three intervals."""
        timeout = max(seconds, self._shortest_timeout)
        return {rank: age for rank, age in self.heartbeat_ages().items() if age >= timeout}

    @abstractmethod
    def heartbeat_ages(self) -> dict[int, float]:
        """Seconds since each connected rank was last heard: on rank 0 all others, else rank 0.

        As of this side's last poll, which is one heartbeat interval ago at most.
        """

    def never_connected(self, seconds: float) -> set[int]:
        """On rank 0: the ranks that opened the store `seconds` ago and have not connected."""
        return set()

    def await_connection(self) -> None:
        """Wait until rank 0, which must have started, is connected. UserError if that fails."""
        return

    @abstractmethod
    def fail(self, reason: str) -> None:
        """Tell the others why this rank ends."""

    @abstractmethod
    def leave(self, seconds: float = 0.0) -> None:
        """Declare that this rank's end is no failure: all have finished, or know one error.

        Waits up to `seconds`: the others until rank 0 leaves, so that a launcher cannot kill it
        before it has printed that error, and rank 0 until they have left or ended, because it may
        host the store that they still read.
        """

    @abstractmethod
    def _query_silent(self) -> dict[int, float]:
        """The ranks without a heartbeat for too long, as rank 0 knows them, and for how long."""

    def _report(self, failure: RankFailure) -> None:
        """Keep the first failure. Those after the end of the run are none."""
        if self._closed.is_set():
            return
        if self._failure is None:
            self._hosts.setdefault(failure.rank, failure.host)
            self._failure = failure
        self._failed.set()

    def _report_end(self, rank: int, last_heard: float, *, is_unreachable: bool) -> None:
        """Report a rank whose connection has ended; `last_heard` by time.monotonic()."""
        age = time.monotonic() - last_heard
        self._report(RankFailure(rank, self._hosts[rank], "", clock(age), age, is_unreachable))


@dataclass(frozen=True)
class ServerAddress:
    """Where rank 0 listens, and the token that shows it that a caller belongs to this job."""

    host: str
    port: int
    token: str


def heartbeat_interval(world_size: int) -> float:
    """Seconds between two heartbeats of a rank."""
    return max(_HEARTBEAT_SECONDS, world_size / _HEARTBEATS_A_SECOND)


def encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def try_send(connection: socket.socket, data: bytes) -> None:
    """Send without blocking. A closed connection, or a peer that does not read, shows elsewhere."""
    with suppress(OSError):
        connection.send(data)


def clock(seconds_ago: float = 0.0) -> str:
    """The time of day."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds_ago))
