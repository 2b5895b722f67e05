"""Finds which ranks of a job are alive: rank 0 is connected to each, and tells all when one fails.

The kernel closes a process's connection whenever the process ends, so rank 0 knows at once, and
nobody has to guess from what fails afterwards. All are told which ranks have ended, so that whoever
waits for one need not wait on (`ended`). Over the same connection each rank sends heartbeats,
which show whether a process that exists also responds, and carry its record (`share_record`). A
rank can also ask something of all others (`request`). The connection also shows which of its
addresses a rank reaches the others by.

A rank that has not connected yet is looked for among the processes of its host (`LocalRanks`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import sys
import termios
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any, Protocol

import psutil

from hetero.errors import ExchangeError, UserError
from hetero.startup.addresses import (
    PORT_RANGE,
    address_leading_to,
    is_loopback,
    is_unreachable,
    keep_alive,
    listen_everywhere,
    plain_address,
)
from hetero.startup.process import call_in_children, close_in_children
from hetero.text import ranks_on_hosts

_ADDRESS_KEY = "hetero/liveness"
_PRESENT_KEY = "hetero/present"
"""The ranks that have opened the store: a line for each, with its host."""
_NO_TIMEOUT = timedelta(days=30)
"""For rank 0 to start: exchanges have a timeout, the client's thread needs none of its own."""
_CONNECT_SECONDS = 20.0
"""For rank 0 to answer one that connects."""
_CONNECTED_SECONDS = 60.0
"""After which a rank that has opened the store should have connected to rank 0."""
_HEARTBEAT = b"\n"
_RECORD = b"="
"""Begins a heartbeat that carries a record; every other message is a JSON object."""
_HEARTBEAT_SECONDS = 1.0
_HEARTBEATS_A_SECOND = 1024
"""The most that rank 0 reads, from all others together."""
_SHORTEST_TIMEOUT_SECONDS = 6.0
"""Before a rank without a heartbeat counts as silent."""
_LATE_SECONDS = 5.0
"""By which a heartbeat may be late without being shown as missing."""
_LARGEST_RECORD = 1 << 16
_HEARTBEAT_TIMEOUT_SECONDS = 15.0
"""After which a rank that is waited for, or its host, hangs."""
_GRACE_SECONDS = 2.0
"""For a rank to fail by itself, with an error of its own, after another has failed. Shorter than a
launcher waits before it kills (agent.py): a rank that is blocked tells why it ends."""
_ACK_SECONDS = 30.0
"""After which the kernel closes the connection to a host that does not respond."""
_SILENT_REMEDY = "see whether it, or its host, hangs, and the network between"
_LONGEST_GREETING = 1024
_ACCEPT_PAUSE_SECONDS = 0.1
_LEAVE_PAUSE_SECONDS = 0.01
_TELL_SECONDS = 0.2
"""Between two messages about ranks that have ended: many end at once, and each goes to all."""
_JOB = (
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID"),
)
"""The variables that the processes of one job have in common."""
_LOOK_SECONDS = 2.0
"""Between two looks at all processes, of which a host may have thousands."""

_log = logging.getLogger(__name__)


def open_liveness(
    store: Any,
    *,
    rank: int,
    world_size: int,
    master: str,
    local_ranks: LocalRanks | None = None,
) -> Liveness:
    """Rank 0 listens and publishes its address; the others wait for that, and connect, in a thread.

    Returns at once, without waiting for rank 0, which may start much later.

    Args:
        store: one of torch's.
        rank: this process's.
        world_size: the number of ranks.
        master: the host by which the store was reached: rank 0's, unless a rendezvous put it
            elsewhere.
        local_ranks: finds ranks of this host that exit before they connect.
    """
    # A connection of its own: waits block the caller's, and one will block this.
    own = store.clone()
    own.append(_PRESENT_KEY, f"{rank} {socket.gethostname()}\n")

    def present() -> dict[int, str]:
        lines = own.get(_PRESENT_KEY).decode().splitlines()
        return {int(rank): host for rank, host in (line.split(" ", 1) for line in lines)}

    if rank == 0:
        server = LivenessServer(
            world_size=world_size,
            token=secrets.token_hex(16),
            present=present,
            local_ranks=local_ranks,
        )
        store.set(_ADDRESS_KEY, json.dumps(server.address_for(master)))
        return server

    def find_server() -> ServerAddress:
        own.wait([_ADDRESS_KEY], _NO_TIMEOUT)
        return ServerAddress.read(json.loads(own.get(_ADDRESS_KEY)), master=master)

    return LivenessClient(find_server, rank=rank, world_size=world_size, local_ranks=local_ranks)


@dataclass(frozen=True)
class RankFailure:
    """What rank 0 tells all others about a rank that has failed."""

    rank: int
    host: str
    reason: str
    """The rank's own error; empty if it exited without reporting an error."""
    last_heard: str
    """The time of day, by rank 0's clock."""
    silent_for: float
    """Seconds from then until its end was noticed."""
    is_unreachable: bool = False
    """True if nothing else is known than that its host does not respond."""

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
        return f"{who} exited without reporting an error{during} ({heard}); see its log"


class Awaited(Protocol):
    """An exchange: which ranks it waits for."""

    def absent(self) -> list[int]: ...

    def missing(self) -> list[int]: ...


@dataclass(frozen=True)
class ServerAddress:
    """Where rank 0 listens, and the token that shows it that a caller belongs to this job."""

    host: str
    port: int
    token: str

    @classmethod
    def read(cls, told: Mapping[str, Any], *, master: str) -> ServerAddress:
        """What `LivenessServer.address_for` has made; `master`: where this rank has the store."""
        return cls(told["host"] or master, told["port"], told["token"])


class Liveness(ABC):
    """One rank's side: rank 0's is a LivenessServer, the others' are LivenessClients."""

    _is_rank_0 = False
    address = "127.0.0.1"
    """This rank's end of its connection to rank 0."""
    is_elsewhere = False
    """True if the connection to rank 0 leads to another host."""

    def __init__(self, world_size: int, local_ranks: LocalRanks | None) -> None:
        """`local_ranks` finds a rank of this host that has exited before it connected."""
        self._local_ranks = local_ranks
        self._interval = heartbeat_interval(world_size)
        self._shortest_timeout = max(_SHORTEST_TIMEOUT_SECONDS, 3 * self._interval)
        self._names: Mapping[int, str] = {}
        self._hosts: dict[int, str] = {}
        self._failure: RankFailure | None = None
        self._ended: frozenset[int] = frozenset()
        self._failed, self._closed = threading.Event(), threading.Event()
        self._take_record: Callable[[], bytes] | None = None
        self._lacks_record = False
        """True once a record could not be sent."""
        self._handle_report: Callable[[RankFailure], None] | None = None
        self._handle_request: Callable[[Mapping[str, Any]], Mapping[str, Any] | None] | None = None

    def share_record(self, take: Callable[[], bytes]) -> None:
        """From now on, have heartbeats carry what `take` returns: one line, without its end.

        `take` is called in liveness's thread, about once a second, and must not block. If it fails,
        or returns more than 64 KiB, the heartbeat goes without it, and that is logged once.
        """
        self._take_record = take

    def on_report(self, handle: Callable[[RankFailure], None]) -> None:
        """Call `handle`, in a thread of liveness, with the first failure of a rank, at once."""
        self._handle_report = handle

    def _record(self) -> bytes:
        """What a heartbeat carries."""
        if self._take_record is None:
            return b""
        try:
            record = _RECORD + self._take_record()
            if len(record) < _LARGEST_RECORD:
                return record
            problem = f"it has {len(record)} bytes"
        except Exception as error:  # what is only shown must end no run
            problem = f"{type(error).__name__}: {error}"
        if not self._lacks_record:
            self._lacks_record = True
            _log.warning("this rank's record cannot be sent to rank 0 (%s)", problem)
        return b""

    def on_request(self, handle: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]) -> None:
        """Call `handle`, in a thread, with each request; its answer, if any, goes to rank 0."""
        self._handle_request = handle

    @abstractmethod
    def request(self, what: Mapping[str, Any], *, ranks: Collection[int] | None = None) -> None:
        """Send a request, a JSON mapping, to `ranks`, by default to all, this one included.

        Never waits for an answer. Only rank 0 may name `ranks`.
        """

    def set_names(self, names: Mapping[int, str]) -> None:
        """Set how errors name ranks, as 'rank 3 on b (stage 1)'; by default by rank and host."""
        self._names = names

    def name(self, ranks: Collection[int]) -> str:
        """Ranks with their hosts: 'rank 3 on b (stage 1)', 'ranks 8-15 on b, c'."""
        ordered = sorted(ranks)
        if len(ordered) == 1 and ordered[0] in self._names:
            return self._names[ordered[0]]
        return ranks_on_hosts(ordered, self._hosts)

    def on_failure(self, abort: Callable[[ExchangeError], None]) -> None:
        """Call `abort`, from a thread, if this process still runs 2 s after another's failure."""

        def wait() -> None:
            self._failed.wait()
            if not self._closed.wait(_GRACE_SECONDS) and (cause := self.cause(0)) is not None:
                abort(ExchangeError(cause, known_to_all=False))

        threading.Thread(target=wait, name="liveness abort", daemon=True).start()

    def set_heartbeat_timeout(self, seconds: float) -> None:
        """From now on, a rank without a heartbeat for so long (three at least) counts as failed.

        Without it, if only some ranks wait for one that hangs, the others do not learn of it.
        """

        def watch() -> None:
            while not (self._failed.wait(self._interval) or self._closed.is_set()):
                for rank, age in self.silent(seconds).items():
                    reason = f"no heartbeat for {age:.0f} s; {_SILENT_REMEDY}"
                    self._report(RankFailure(rank, self._hosts[rank], reason, _clock(age), age))

        threading.Thread(target=watch, name="liveness timeout", daemon=True).start()

    @property
    def unreachable(self) -> str | None:
        """Why this rank could not connect to rank 0, in a sentence."""
        return None

    def ended(self) -> frozenset[int]:
        """The ranks that have left or exited, as this rank knows within moments. Thread-safe.

        Not those that cannot be reached any more, and on other ranks than 0 none that does so after
        rank 0 has ended.
        """
        return self._ended

    @property
    def failure(self) -> RankFailure | None:
        """The first failure of a rank, if there is one."""
        return self._failure

    def cause(self, seconds: float = 1.5) -> str | None:
        """A sentence about the rank that failed first, or else is silent. Waits up to `seconds`."""
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

        As of this side's last poll, at most one heartbeat interval ago.
        """

    def require_alive(self, exchange: Awaited, during: str, *, joining: bool) -> None:
        """Raise ExchangeError if a rank has failed, or hangs while an exchange waits for it.

        Args:
            exchange: knows which ranks have not come, and which have not submitted.
            during: what the ranks do, such as "while the ranks opened the links".
            joining: True while ranks may still be on their way, and need not be connected.
        """
        failed = self._failure
        if failed is not None and (self._is_rank_0 or failed.rank == 0):
            text = failed.sentence(self.name([failed.rank]), during=f" {during}")
            raise ExchangeError(text, known_to_all=failed.rank > 0)
        silent = self.silent(_HEARTBEAT_TIMEOUT_SECONDS)
        if silent and self._is_rank_0:
            awaited = set(exchange.missing())
            silent = {rank: age for rank, age in silent.items() if rank in awaited}
        if silent:
            raise ExchangeError(
                f"{self.name(silent)} hangs, or its host does, {during}: nothing was heard of it "
                f"for {min(silent.values()):.0f} s; see its log",
                known_to_all=0 not in silent,
            )
        if not joining:
            return
        if self._local_ranks is not None:
            self._local_ranks.require_alive(exchange.absent())
        lost = self.never_connected(_CONNECTED_SECONDS)
        if lost and (lost := lost & set(exchange.absent())):
            raise ExchangeError(
                f"{self.name(lost)} ended {during}, or cannot reach rank 0, to which it has not "
                "connected; see its log",
                known_to_all=True,
            )

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
        """Declare that this rank's end is not a failure: all have finished, or know one error.

        Waits up to `seconds`: the others until rank 0 leaves, so that a launcher cannot kill it
        before it has printed that error, and rank 0 until they have left or ended, because it may
        host the store that they still read.
        """

    @abstractmethod
    def _query_silent(self) -> dict[int, float]:
        """The ranks that rank 0 has not heard for too long, and for how many seconds."""

    def _serve_request(self, what: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The answer of this rank; None if it has none, or cannot give it."""
        if self._handle_request is None:
            return None
        try:
            return self._handle_request(what)
        except Exception as error:  # what is asked for is a convenience, and must end no run
            _log.warning("a request of liveness failed: %s", error)
            return None

    def _report(self, failure: RankFailure) -> None:
        """Keep the first failure. After the end of the run, nothing counts as a failure."""
        if self._closed.is_set():
            return
        if self._failure is None:
            self._hosts.setdefault(failure.rank, failure.host)
            self._failure = failure
            if self._handle_report is not None:
                self._handle_report(failure)
        self._failed.set()

    def _report_end(self, rank: int, last_heard: float, *, is_unreachable: bool) -> None:
        """Report a rank whose connection has ended; `last_heard` by time.monotonic()."""
        if not is_unreachable:
            self._ended |= {rank}
        age = time.monotonic() - last_heard
        self._report(RankFailure(rank, self._hosts[rank], "", _clock(age), age, is_unreachable))


class LivenessClient(Liveness):
    """Waits for rank 0 to start, connects and receives, all in one thread."""

    def __init__(
        self,
        find_server: Callable[[], ServerAddress],
        *,
        rank: int,
        world_size: int,
        local_ranks: LocalRanks | None = None,
        connect_seconds: float = _CONNECT_SECONDS,
    ) -> None:
        """
        Args:
            find_server: waits until rank 0 has published its address.
            connect_seconds: for rank 0 to answer.
        """
        super().__init__(world_size, local_ranks)
        self._rank, self._connect_seconds = rank, connect_seconds
        self._connection: socket.socket | None = None
        self._unreachable: tuple[ServerAddress, OSError] | None = None
        self._last_heard, self._unread = 0.0, b""
        self._unanswered_since: float | None = None
        """When the first heartbeat was sent that rank 0 has not answered."""
        self._last_poll = 0.0
        self._connect_tried, self._replied = threading.Event(), threading.Event()
        self._silent: dict[int, float] = {}
        self._sending = threading.Lock()
        """Held for each message: two threads' must not mix."""
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
        if not self._connect_tried.wait(2 * self._connect_seconds):
            raise UserError(f"{socket.gethostname()} has not found rank 0; see rank 0's log")
        if self.unreachable is not None:
            raise UserError(self.unreachable)

    @property
    def unreachable(self) -> str | None:
        if self._unreachable is None:
            return None
        server, error = self._unreachable
        return (
            f"{socket.gethostname()} cannot reach {self.name([0])} at {server.host}, port "
            f"{server.port} ({error}); see whether it has ended, and open the ports between the "
            f"nodes ({PORT_RANGE}), which links and gloo need too"
        )

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

    def request(self, what: Mapping[str, Any], *, ranks: Collection[int] | None = None) -> None:
        if ranks is not None:
            raise ValueError("only rank 0 may ask single ranks")
        self._send({"request": dict(what)})

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._connection is not None:
            with suppress(OSError), self._sending:
                self._connection.sendall(_encode(message))

    def _run(self, find_server: Callable[[], ServerAddress]) -> None:
        try:
            server = find_server()
        except Exception:  # the store is gone, which the main thread notices and reports too
            return
        try:
            self._connection = self._connect(server)
        except OSError as error:
            self._unreachable = server, error
        self._connect_tried.set()
        if self._connection is not None:
            if self._closed.is_set():
                self._send({"leave": True})
            self._receive_loop(self._connection)

    def _connect(self, server: ServerAddress) -> socket.socket:
        address = server.host, server.port
        connection = socket.create_connection(address, timeout=self._connect_seconds)
        keep_alive(connection, ack_timeout=_ACK_SECONDS)
        local, remote = connection.getsockname()[0], connection.getpeername()[0]
        host = socket.gethostname()
        connection.sendall(_encode({"token": server.token, "rank": self._rank, "host": host}))
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
        connection.settimeout(None)
        close_in_children(connection)
        return connection

    def _receive_loop(self, connection: socket.socket) -> None:
        data, unreachable = b"", False
        while True:
            if self._closed.is_set():
                return
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
                    # To a rank 0 that is stopped records would fill the buffers, and end the
                    # connection as if its host did not respond.
                    record = b"" if self._unanswered_since else self._record()
                    self._unanswered_since = self._unanswered_since or self._last_poll
                    with self._sending:
                        connection.sendall(record + _HEARTBEAT)
            except (OSError, ValueError) as error:
                unreachable = isinstance(error, OSError) and is_unreachable(error)
                break
        self._report_end(0, self._last_heard, is_unreachable=unreachable)

    def _handle(self, message: Mapping[str, Any]) -> None:
        if "failure" in message:
            self._report(RankFailure(**message["failure"]))
        elif "ended" in message:
            self._ended |= set(message["ended"])
            if 0 in self._ended:
                self._closed.set()
        elif "silent" in message:
            self._silent = {int(rank): float(age) for rank, age in message["silent"].items()}
            self._replied.set()
        elif "request" in message:
            answer = self._serve_request(message["request"])
            if answer is not None:
                self._send({"answer": dict(answer)})


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

    _is_rank_0 = True

    def __init__(
        self,
        *,
        world_size: int,
        token: str,
        present: Callable[[], Mapping[int, str]] = dict,
        local_ranks: LocalRanks | None = None,
    ) -> None:
        """`present` returns the hosts of the ranks that have opened the store."""
        super().__init__(world_size, local_ranks)
        self._token, self._host, self._present = token, socket.gethostname(), present
        self._others = world_size - 1
        self._gone: set[int] = set()
        """The ranks that have left or ended, or that cannot be reached any more."""
        self._untold: set[int] = set()
        """Those that have ended, of which the others have not been told."""
        self._told = 0.0
        self._stopped = threading.Event()
        self._first_seen: dict[int, float] = {}
        self._clients: set[_Client] = set()
        self._last_poll = time.monotonic()
        self._lock = threading.Lock()
        self._handle_record: Callable[[int, bytes], None] | None = None
        self._unread_records: set[int] = set()
        """The ranks of which one could not be read, which has been logged."""
        self._handle_answer: Callable[[int, Mapping[str, Any]], None] | None = None
        self._listener = listen_everywhere(backlog=min(world_size, 4096))
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        call_in_children(self, LivenessServer._close_all)
        threading.Thread(target=self._run, name="liveness", daemon=True).start()

    def address_for(self, master: str) -> dict[str, Any]:
        """Where the others find this server, as JSON; `master`: the host of their store.

        Its host is empty if that is the store's.
        """
        return asdict(ServerAddress(address_leading_to(master) or "", self.port, self._token))

    def expect(self, present: Mapping[int, str]) -> None:
        """Say which ranks are there, with their hosts, instead of the constructor's `present`."""
        self._present = lambda: present

    def fail(self, reason: str) -> None:
        self._report(RankFailure(0, self._host, reason, _clock(), 0.0))

    def on_record(self, handle: Callable[[int, bytes], None]) -> None:
        """Call `handle`, in liveness's thread, with each record that arrives, and its rank.

        It must take microseconds: there are up to 1,024 records a second.
        """
        self._handle_record = handle

    def on_answer(self, handle: Callable[[int, Mapping[str, Any]], None]) -> None:
        """Call `handle`, in liveness's thread, with each answer to a request, and its rank."""
        self._handle_answer = handle

    def request(self, what: Mapping[str, Any], *, ranks: Collection[int] | None = None) -> None:
        self._broadcast({"request": dict(what)}, ranks=ranks)
        if ranks is None or 0 in ranks:
            answer = self._serve_request(what)
            if answer is not None and self._handle_answer is not None:
                self._handle_answer(0, answer)

    def probe(self, ranks: Collection[int]) -> None:
        """Send each of these ranks a byte, which the kernel of its host acknowledges."""
        with self._lock:
            for client in self._clients:
                if client.rank in ranks:
                    _try_send(client.connection, _HEARTBEAT)

    def unacknowledged(self, ranks: Collection[int]) -> set[int]:
        """Those of these ranks whose host has not acknowledged all that was sent to them.

        The kernel does that for a process that hangs or is stopped, too.
        """
        with self._lock:
            clients = [client for client in self._clients if client.rank in ranks]
            return {c.rank for c in clients if c.rank is not None and _unsent(c.connection)}

    def leave(self, seconds: float = 0.0) -> None:
        self._closed.set()
        self._ended |= {0}
        self._broadcast({"ended": sorted(self._ended)})
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
            self._tell_ended()
            pause = min(self._interval, _TELL_SECONDS) if self._untold else self._interval
            for ready, _ in self._selector.select(pause):
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
            keep_alive(connection, ack_timeout=_ACK_SECONDS)
            client = _Client(connection, last_heard=time.monotonic())
            with self._lock:
                self._clients.add(client)
            self._selector.register(connection, selectors.EVENT_READ, client)

    def _receive(self, client: _Client) -> None:
        try:
            data = client.connection.recv(1 << 14)
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
        longest = _LONGEST_GREETING if client.rank is None else _LARGEST_RECORD
        if len(client.unread) > longest:
            self._drop(client)

    def _handle(self, client: _Client, data: bytes) -> None:
        if not data:
            _try_send(client.connection, _HEARTBEAT)
            return
        if data.startswith(_RECORD) and client.rank is not None:
            _try_send(client.connection, _HEARTBEAT)
            self._take_in(client.rank, data[len(_RECORD) :])
            return
        try:
            message = json.loads(data)
            if client.rank is None:
                self._admit(client, message)
            elif "failed" in message:
                host, reason = self._hosts[client.rank], str(message["failed"])
                self._report(RankFailure(client.rank, host, reason, _clock(), 0.0))
            elif "leave" in message:
                self._drop(client)
                self._note_end(client.rank)
            elif "ask" in message:
                ages = {str(rank): age for rank, age in self._query_silent().items()}
                _try_send(client.connection, _encode({"silent": ages}))
            elif "request" in message:
                self.request(message["request"])
            elif "answer" in message and self._handle_answer is not None:
                self._handle_answer(client.rank, message["answer"])
        except (ValueError, KeyError, TypeError, RecursionError):
            # Not a rank of this job, but for example a port scanner.
            self._drop(client)

    def _take_in(self, rank: int, record: bytes) -> None:
        if self._handle_record is None:
            return
        try:
            self._handle_record(rank, record)
        except Exception as error:  # what is only shown must end no run
            if rank not in self._unread_records:
                self._unread_records.add(rank)
                _log.warning("the record of %s cannot be read: %s", self.name([rank]), error)

    def _admit(self, client: _Client, greeting: Mapping[str, Any]) -> None:
        if not hmac.compare_digest(str(greeting["token"]), self._token):
            raise ValueError("it is of another job")
        rank = int(greeting["rank"])
        if any(other.rank == rank for other in self._clients):
            raise ValueError("another process has this rank, as of a job started twice")
        self._hosts[rank] = str(greeting["host"])
        with self._lock:
            _try_send(client.connection, _encode({"welcome": True, "host": self._host}))
            client.rank = rank
        # What was broadcast before this rank connected.
        if self._ended:
            _try_send(client.connection, _encode({"ended": sorted(self._ended)}))
        if self._failure is not None:
            _try_send(client.connection, _encode({"failure": asdict(self._failure)}))

    def _on_disconnect(self, client: _Client, *, is_unreachable: bool = False) -> None:
        self._drop(client)
        if client.rank is not None:
            if not is_unreachable:
                self._note_end(client.rank)
            self._report_end(client.rank, client.last_heard, is_unreachable=is_unreachable)

    def _note_end(self, rank: int) -> None:
        self._ended |= {rank}
        self._untold.add(rank)

    def _tell_ended(self) -> None:
        if self._untold and (now := time.monotonic()) >= self._told + _TELL_SECONDS:
            self._broadcast({"ended": sorted(self._untold)})
            self._untold.clear()
            self._told = now

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

    def _broadcast(
        self, message: Mapping[str, Any], *, ranks: Collection[int] | None = None
    ) -> None:
        """Send a message to `ranks`, by default to all that have connected."""
        line = _encode(message)
        with self._lock:
            for client in self._clients:
                if client.rank is not None and (ranks is None or client.rank in ranks):
                    _try_send(client.connection, line)

    def _close_all(self) -> None:
        for connection in (self._listener, *(c.connection for c in self._clients)):
            connection.close()


class LocalRanks:
    """The processes of this job on this host, by rank, to find ranks that exit before they connect.

    Processes are found by the job's variables in their environment, whatever has set them: a step
    of Slurm, torchrun's agent or a shell.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """`environ` is the environment of one of the job's processes, by default of this one."""
        self._job = _variables(os.environ if environ is None else environ)
        self._seen: dict[int, set[psutil.Process]] = {}
        self._looked = -_LOOK_SECONDS

    def look(self) -> None:
        """Look for processes of the job, unless the last look was a moment ago."""
        if (now := time.monotonic()) - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        for process in psutil.process_iter():
            # Processes of other users cannot be read, nor those that have exited.
            with contextlib.suppress(psutil.Error, OSError):
                environ = process.environ()
                if environ.get("RANK", "").isdecimal() and _variables(environ) == self._job:
                    self._seen.setdefault(int(environ["RANK"]), set()).add(process)

    def require_alive(self, awaited: Iterable[int]) -> None:
        """Raise ExchangeError if any of these ranks, which have not connected, has exited."""
        if ended := self.ended(awaited):
            host = socket.gethostname()
            who = "; ".join(f"rank {rank} on {host} (pid {pid})" for rank, pid in ended.items())
            raise ExchangeError(
                f"{who} ended before it joined the others; see its log",
                known_to_all=0 not in ended,
            )

    def ended(self, awaited: Iterable[int]) -> dict[int, int]:
        """The `awaited` ranks that have exited, with the pid of each."""
        self.look()
        found = {}
        for rank in awaited:
            processes = self._seen.get(rank, set())
            if processes and not any(map(_is_alive, processes)):
                found[rank] = min(process.pid for process in processes)
        return found


def heartbeat_interval(world_size: int) -> float:
    """Seconds between two heartbeats of a rank."""
    return max(_HEARTBEAT_SECONDS, world_size / _HEARTBEATS_A_SECOND)


def silent_after(world_size: int) -> float:
    """Seconds after which the last record of a rank is too old: the rank is silent."""
    return heartbeat_interval(world_size) + _LATE_SECONDS


def _encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _try_send(connection: socket.socket, data: bytes) -> None:
    """Send without blocking. A closed connection, or a peer that does not read, shows elsewhere."""
    with suppress(OSError):
        connection.send(data)


def _unsent(connection: socket.socket) -> int:
    """Bytes that the peer's kernel has not acknowledged."""
    with suppress(OSError):
        answer = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(answer, sys.byteorder)
    return 0


def _clock(seconds_ago: float = 0.0) -> str:
    """The time of day."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds_ago))


def _variables(environ: Mapping[str, str]) -> list[str | None]:
    return [environ.get(name) for name in _JOB]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
