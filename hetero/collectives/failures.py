"""How the ranks of a group learn that a rank has failed or exited, and which rank.

A rank whose call fails submits its status to an exchange in the group's store. Ranks that are in no
call poll that exchange, and then submit their last call. A rank that submits nothing has exited;
one that waits for it to open a link sees that by its `Presence`. `explain` names the culprit.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from hetero.collectives.layout import Layout, Member
from hetero.collectives.work import Call
from hetero.errors import ExchangeError, LinkError
from hetero.startup.addresses import (
    PORT_RANGE,
    interface_with,
    is_loopback,
    listen_everywhere,
)
from hetero.startup.exchange import Exchange
from hetero.startup.process import close_in_children
from hetero.startup.store import BoundedStore, StoreHostEnded
from hetero.text import spans

POLL_SECONDS = 2.0
"""How often a rank that is not in a call checks whether another rank has failed."""
_GRACE_SECONDS = 3 * POLL_SECONDS
_PAUSE_SECONDS = 0.05

IN_A_CALL, IDLE, LEFT, ABORTED = "in a call", "idle", "left", "aborted"


@dataclass(frozen=True)
class RankStatus:
    """The report of one rank, submitted when a rank has failed or when it leaves the group."""

    rank: int
    """In the group."""
    state: str
    """IN_A_CALL, IDLE, LEFT or ABORTED."""
    call: Call | None
    """The call that failed, or the last call that was made."""
    error: str = ""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RankStatus:
        call = values["call"]
        return cls(**{**values, "call": call and Call.from_dict(call)})


@dataclass(frozen=True)
class Report:
    """The statuses that the ranks of a group have reported, the first one first.

    The first with an error has the cause, later ones its consequences.
    """

    statuses: Sequence[RankStatus]
    store_error: str = ""
    """Why statuses could not be read, if so, and who has exited as far as that is known."""


class Statuses:
    """The statuses of one group's ranks: an exchange for whose end nobody waits."""

    def __init__(
        self, store: dist.Store, layout: Layout, *, has_gone: Callable[[Member], bool]
    ) -> None:
        """`has_gone` says whether a rank will report nothing any more."""
        self._exchange = Exchange(
            BoundedStore(store, seconds=POLL_SECONDS),  # a caller's next call waits for a poll
            "statuses",
            member=layout.rank,
            size=layout.size,
        )
        self._layout, self._has_gone = layout, has_gone
        self._lock, self._has_submitted = threading.Lock(), False
        self._is_lost = False
        """Whether the store's host has exited. PyTorch logs a stack trace each time it is asked."""

    def submit(self, status: RankStatus) -> None:
        """Report this rank's status. The first one counts; a store that is gone is ignored."""
        with self._lock:
            is_first, self._has_submitted = not self._has_submitted, True
        if is_first:
            with contextlib.suppress(ExchangeError, RuntimeError):
                self._exchange.submit(asdict(status))

    def has_failure(self) -> bool:
        """Returns True once a rank has reported anything other than that it leaves."""
        if self._is_lost:
            return False
        try:
            return self._exchange.has_begun() and any(
                status.state != LEFT for status in self._submitted().values()
            )
        except (ExchangeError, RuntimeError) as error:
            # One that only hangs may answer later.
            self._is_lost = isinstance(error.__cause__, StoreHostEnded)
            return False

    def collect(self, own: RankStatus, *, seconds: float = _GRACE_SECONDS) -> Report:
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
                submitted = self._submitted()
                found = submitted if own.rank in submitted else {**submitted, own.rank: own}
                missing = [m for m in missing if m.rank not in {*found, *gone}]
                if missing:
                    time.sleep(_PAUSE_SECONDS)
            store_error = ""
        except ExchangeError as error:
            store_error = "; ".join([*self._ended_with_store(missing), str(error.__cause__)])
        return Report(list(found.values()), store_error)

    def _submitted(self) -> dict[int, RankStatus]:
        """By rank, the first one first."""
        submitted = self._exchange.submitted()
        return {rank: RankStatus.from_dict(values) for rank, values in submitted.items()}

    def _ended_with_store(self, missing: Sequence[Member]) -> Iterator[str]:
        """Which rank has exited, if the store was in its process.

        Without a store the others cannot say that they are there, and exit for the same reason:
        only who has exited first is of interest.
        """
        deadline = time.monotonic() + POLL_SECONDS
        while time.monotonic() < deadline:
            for member in missing:
                if self._has_gone(member):
                    yield f"{member} has exited or left the group"
                    return
            time.sleep(_PAUSE_SECONDS)


def explain(group: str, layout: Layout, report: Report, *, own: RankStatus, timeout: float) -> str:
    """One sentence on what happened. Pure."""
    statuses = sorted(report.statuses, key=lambda status: status.rank)
    called = f"{own.call}" if own.call else "a call"
    opening = (
        f"{called} of group {group}, with a timeout of {timeout:g} s, failed on "
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
    # A rank in a call of another number is ahead or behind; it has not called anything different.
    numbers = Counter(call.sequence for call in calls)
    if different := [
        f"{calls[call]} called {call}" for call in calls if numbers[call.sequence] > 1
    ]:
        reasons.append(
            f"the ranks called different collectives: {'; '.join(different)}; "
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
    first = next((status for status in report.statuses if status.error), None)
    if first is None or not reasons:
        return f"{opening}: {'; '.join(reasons or _first_error(layout, first, calls))}"
    # A rank closes its links because of the failure: do not blame it for what other links report.
    who = "" if first.rank == own.rank else f"{layout.members[first.rank]}: "
    is_told = different or first.state == ABORTED
    return f"{opening}: {'; '.join(reasons)}{'' if is_told else f' ({who}{first.error})'}"


def _first_error(layout: Layout, first: RankStatus | None, calls: Mapping[Call, str]) -> list[str]:
    """The error that came before all others, and which ranks were in other calls then."""
    if first is None:
        return []
    during = f" failed in {first.call}" if len(calls) > 1 else ""
    last = first.call.sequence if first.call else 0
    return [
        f"{layout.members[first.rank]}{during}: {first.error}",
        *(
            f"{names} had {'gone on' if call.sequence > last else 'only reached'} to {call}"
            for call, names in calls.items()
            if call != first.call
        ),
    ]


def _ranks_by_call(layout: Layout, statuses: Sequence[RankStatus]) -> Mapping[Call, str]:
    found: dict[Call, list[Member]] = {}
    for status in statuses:
        if status.call is not None:
            found.setdefault(status.call, []).append(layout.members[status.rank])
    return {
        call: f"{members[0]} ({members[0].vendor})"
        if len(members) == 1
        else spans([member.global_rank for member in members])
        for call, members in found.items()
    }


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
        """Returns True if a rank of the group has exited or left. Thread-safe."""
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
        """Raise LinkError if a rank of the group has exited or left."""
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
    """Returns True if this host has the same address, as of `docker0`, and would answer itself."""
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
