"""How the ranks of a group learn that one has failed or ended, and which.

A rank whose call fails writes its status to the group's store and sets a failure flag there. Ranks
that are in no call poll the flag and then report their last call. A rank that reports nothing has
exited; one that waits for it to open a link sees that by its `Presence`. `explain` names the
culprit.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hetero.collectives.layout import Layout, Member
from hetero.collectives.work import Call
from hetero.errors import LinkError
from hetero.startup.addresses import (
    PORT_RANGE,
    interface_with,
    is_loopback,
    listen_everywhere,
)
from hetero.startup.process import close_in_children
from hetero.startup.store import BoundedStore, StoreHostEnded
from hetero.text import spans

POLL_SECONDS = 2.0
"""How often a rank that is in no call polls the failure flag."""
_GRACE_SECONDS = 3 * POLL_SECONDS
_FAILURE_FLAG = "failure"
_PAUSE_SECONDS = 0.05

IN_A_CALL, IDLE, LEFT, ABORTED = "in a call", "idle", "left", "aborted"


@dataclass(frozen=True)
class RankStatus:
    """What one rank reports when something has failed."""

    rank: int
    """In the group."""
    state: str
    """IN_A_CALL, IDLE, LEFT or ABORTED."""
    call: Call | None
    """The call that failed, or the last one that was made."""
    error: str = ""
    failure_order: int = 0
    """Position among the ranks that set the failure flag: the first has the cause, later ones its
    consequences."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes | str) -> RankStatus:
        values: dict[str, Any] = json.loads(text)
        if values["call"] is not None:
            values["call"] = Call.from_dict(values["call"])
        return cls(**values)


@dataclass(frozen=True)
class StatusReport:
    """The statuses that the ranks of a group have reported."""

    statuses: Sequence[RankStatus]
    store_error: str = ""
    """Why statuses could not be read, if so, and who has ended as far as that is known."""


class StatusBoard:
    """The statuses of one group's ranks, in the group's store."""

    def __init__(
        self, store: dist.Store, layout: Layout, *, has_gone: Callable[[Member], bool]
    ) -> None:
        """`has_gone` says whether a rank will report nothing any more."""
        # A caller's next call waits for a poll to end.
        self._store, self._layout = BoundedStore(store, seconds=POLL_SECONDS), layout
        self._has_gone = has_gone
        self._is_lost = False
        """Whether the store's host has ended. PyTorch logs a stack trace each time it is asked."""

    def publish(self, status: RankStatus, *, failed: bool = False) -> RankStatus:
        """Write this rank's status, and with `failed` the flag. A store that is gone is ignored."""
        with contextlib.suppress(RuntimeError):
            if failed:
                status = replace(status, failure_order=self._store.add(_FAILURE_FLAG, 1))
            self._store.set(self._key(status.rank), status.encode())
        return status

    def has_failure(self) -> bool:
        if self._is_lost:
            return False
        try:
            return self._store.check([_FAILURE_FLAG])
        except RuntimeError as error:
            # One that only hangs may answer later.
            self._is_lost = isinstance(error, StoreHostEnded)
            return False

    def collect(self, own: RankStatus, *, seconds: float = _GRACE_SECONDS) -> StatusReport:
        """This rank's status and those that the others report within `seconds`."""
        found = {own.rank: own}
        began = time.monotonic()
        missing = [member for member in self._layout.members if member.rank != own.rank]
        try:
            while missing and time.monotonic() < began + seconds:
                # Ask before reading what it may have said last, and not before most have answered:
                # each question is a connection.
                asks = time.monotonic() > began + POLL_SECONDS
                gone = {member.rank for member in missing if asks and self._has_gone(member)}
                for member in missing:
                    if self._store.check([self._key(member.rank)]):
                        text = self._store.get(self._key(member.rank))
                        found[member.rank] = RankStatus.decode(text)
                missing = [m for m in missing if m.rank not in {*found, *gone}]
                if missing:
                    time.sleep(_PAUSE_SECONDS)
            store_error = ""
        except dist.DistNetworkError as error:
            store_error = "; ".join([*self._ended_with_store(missing), str(error)])
        return StatusReport([found[rank] for rank in sorted(found)], store_error)

    def _ended_with_store(self, missing: Sequence[Member]) -> Iterator[str]:
        """Which rank has ended, if the store was in its process.

        Without a store the others cannot say that they are there, and end for the same reason: only
        who has ended first is of interest.
        """
        deadline = time.monotonic() + POLL_SECONDS
        while time.monotonic() < deadline:
            for member in missing:
                if self._has_gone(member):
                    yield f"{member} has exited or left the group"
                    return
            time.sleep(_PAUSE_SECONDS)

    @staticmethod
    def _key(rank: int) -> str:
        return f"status/{rank}"


def explain(
    group: str, layout: Layout, report: StatusReport, *, own: RankStatus, timeout: float
) -> str:
    """One sentence on what happened. Pure."""
    statuses = report.statuses
    called = f"{own.call}" if own.call else "a call"
    opening = (
        f"{called} of group {group}, whose timeout is {timeout:g} s, failed on "
        f"{layout.members[layout.rank]}"
    )
    missing = [m for m in layout.members if m.rank not in {s.rank for s in statuses}]
    in_call = [s for s in statuses if s.state == IN_A_CALL]
    reasons = []
    if report.store_error:
        reasons.append(report.store_error)
    elif missing:
        reasons.append(
            f"{_names(missing)} did not report: exited, or cannot be reached; see its log"
        )
    calls = _ranks_by_call(layout, in_call)
    latest = max((call.sequence for call in calls), default=0)
    # A rank that is in another call of another number has not called anything different.
    numbers = Counter(call.sequence for call in calls)
    if different := [
        f"{calls[call]} called {call}" for call in calls if numbers[call.sequence] > 1
    ]:
        reasons.append(
            f"the ranks called different things: {'; '.join(different)}; "
            "make every rank call the same operations in the same order"
        )
    for status in statuses:
        if status.state == ABORTED:
            why = f": {status.error}" if status.error else ""
            reasons.append(f"{layout.members[status.rank]} aborted the group{why}")
    for state, what in ((IDLE, "is in no call"), (LEFT, "has left the group")):
        for status in statuses:
            last = status.call.sequence if status.call else 0
            if status.state == state and last < latest:
                after = f" since {status.call}" if status.call else ""
                reasons.append(f"{layout.members[status.rank]} {what}{after}")
    first = _first_failed(statuses)
    if first is None or not reasons:
        return f"{opening}: {'; '.join(reasons or _first_error(layout, first, calls))}"
    # The links of the others say that a rank has closed its own, which is not to blame for that.
    who = "" if first is own else f"{layout.members[first.rank]}: "
    is_told = different or first.state == ABORTED
    return f"{opening}: {'; '.join(reasons)}{'' if is_told else f' ({who}{first.error})'}"


def _first_failed(statuses: Sequence[RankStatus]) -> RankStatus | None:
    """The status whose error came before all others."""
    failed = [status for status in statuses if status.error]
    return min(failed, key=lambda status: status.failure_order) if failed else None


def _first_error(layout: Layout, first: RankStatus | None, calls: Mapping[Call, str]) -> list[str]:
    """The error that came before all others, and which ranks were in other calls then."""
    if first is None:
        return []
    during = f" failed in {first.call}" if len(calls) > 1 else ""
    last = first.call.sequence if first.call else 0
    return [
        f"{layout.members[first.rank]}{during}: {first.error}",
        *(
            f"{names} had {'gone on' if call.sequence > last else 'only come'} to {call}"
            for call, names in calls.items()
            if call != first.call
        ),
    ]


def _ranks_by_call(layout: Layout, statuses: Sequence[RankStatus]) -> Mapping[Call, str]:
    ranks: dict[Call, list[int]] = {}
    for status in statuses:
        if status.call is not None:
            ranks.setdefault(status.call, []).append(layout.members[status.rank].global_rank)
    return {call: spans(numbers) for call, numbers in ranks.items()}


def _names(members: Sequence[Member]) -> str:
    return ", ".join(map(str, members))


_LARGEST_BACKLOG = 4096
_CONNECT_SECONDS = 1.0


class Presence:
    """One rank's listener, and its connections to those that it waits for.

    Each rank listens until it leaves the group or its process exits. Nothing is ever accepted or
    sent: the kernel resets the connections of a process that has exited, and refuses new ones.

    Args:
        size: of the group.
        store_host: by which name this rank reaches the host of the store.
    """

    def __init__(self, *, size: int, store_host: str) -> None:
        # A rank's two kinds of devices wait for each peer twice each: calls and messages.
        self._listener = listen_everywhere(backlog=min(4 * size, _LARGEST_BACKLOG))
        close_in_children(self._listener)
        self.store_host = store_host
        self.port: int = self._listener.getsockname()[1]
        self._connections: dict[int, socket.socket] = {}

    def has_gone(self, member: Member) -> bool:
        """Whether a rank of the group has ended or left. Any thread may call it."""
        if _is_own_address_of_another_host(member):
            return False
        connection = self._connections.get(member.rank)
        try:
            # A connection may be lost with a network. Only a refusal shows that nobody listens.
            if connection is None or _is_lost(connection):
                self._connections[member.rank] = self._connect(member)
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False

    def require(self, member: Member) -> None:
        """Raise LinkError if a rank of the group has ended or left."""
        was_reached = member.rank in self._connections
        if not self.has_gone(member):
            return
        if was_reached:
            raise LinkError(f"{member} has exited or left the group; see its log")
        host, port = member.address
        raise LinkError(
            f"{member} has exited or left the group, or a firewall rejects connections to "
            f"{host}:{port}; see its log, or open the ports between the hosts ({PORT_RANGE})"
        )

    def _connect(self, member: Member) -> socket.socket:
        host, port = member.address
        # A rank whose own address is of the loopback interface is on the store's host.
        host = self.store_host if is_loopback(host) else host
        connection = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
        connection.setblocking(False)
        return connection

    def leave(self) -> None:
        """Stop listening. The others' `require` raises from now on."""
        for connection in (self._listener, *self._connections.values()):
            connection.close()


def _is_own_address_of_another_host(member: Member) -> bool:
    """Whether this host has a member's address too, as of `docker0`, and would answer itself."""
    host, _ = member.address
    if is_loopback(host) or member.host == socket.gethostname():
        return False
    return interface_with(host) is not None


def _is_lost(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


_VERDICT_SECONDS = 2.0
_PASSED, _FAILED = "passed", "failed"


class MonitoredBarrier:
    """The monitored barriers of one group, with gloo's errors, over the store alone."""

    def __init__(self, store: dist.Store, *, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._count = 0

    def wait(self, timeout: timedelta, *, wait_all_ranks: bool = False) -> None:
        """Rank 0 waits for all others, which wait for its verdict. RuntimeError names the missing.

        Args:
            wait_all_ranks: name all missing ranks, not only the first.
        """
        self._count += 1
        store = BoundedStore(self._store, seconds=timeout.total_seconds() + _VERDICT_SECONDS)
        name = f"monitored barrier {self._count}"
        if self._rank:
            self._report_to_rank_0(store, name, timeout)
            return
        missing: list[int] = []
        deadline = time.monotonic() + timeout.total_seconds()
        for rank in range(1, self._size):
            if not missing and time.monotonic() > deadline:
                store.set(f"{name}/verdict", _FAILED)
                raise RuntimeError(
                    f"Rank 0 timed out in monitoredBarrier after {timeout}; give it more time"
                )
            if not _comes(store, f"{name}/{rank}", seconds=deadline - time.monotonic()):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        store.set(f"{name}/verdict", _FAILED if missing else _PASSED)
        if missing:
            noun = "Ranks" if wait_all_ranks else "Rank"
            names = ", ".join(map(str, missing))
            raise RuntimeError(
                f"{noun} {names} failed to pass monitoredBarrier in {timeout}; see the log there"
            )

    def _report_to_rank_0(self, store: BoundedStore, name: str, timeout: timedelta) -> None:
        store.set(f"{name}/{self._rank}", "reached")
        verdict, seconds = f"{name}/verdict", timeout.total_seconds() + _VERDICT_SECONDS
        if not _comes(store, verdict, seconds=seconds) or store.get(verdict).decode() != _PASSED:
            raise RuntimeError(
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors "
                "while waiting for send/recv from rank 0; see what rank 0 says"
            )


def _comes(store: BoundedStore, key: str, *, seconds: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=seconds))
    except dist.DistStoreError:
        return False
    return True
