"""How the ranks of a group learn that a rank has failed or exited, and which rank.

A rank whose call fails submits its status to an exchange in the group's store, as does one that
leaves. Ranks that are in no call poll that exchange, and then submit their last call. A rank that
submits nothing has exited, which liveness knows (world.py). `explain` names the culprit.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from hetero.collectives.layout import Layout, Member
from hetero.collectives.work import Call
from hetero.errors import ExchangeError
from hetero.startup.exchange import Exchange
from hetero.startup.store import BoundedStore, StoreHostEnded
from hetero.text import spans

POLL_SECONDS = 2.0
"""How often a rank that is not in a call checks whether another rank has failed."""
_GRACE_SECONDS = 3 * POLL_SECONDS
_PAUSE_SECONDS = 0.05
_LOOK_SECONDS = 1.0
"""Between two looks for ranks that have left, whoever asks for them."""

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
        self, store: dist.Store, layout: Layout, *, has_exited: Callable[[Member], bool]
    ) -> None:
        """`has_exited` says whether a rank will report nothing any more."""
        self._exchange = Exchange(
            BoundedStore(store, seconds=POLL_SECONDS),  # a caller's next call waits for a poll
            "statuses",
            member=layout.rank,
            size=layout.size,
        )
        self._layout, self._has_exited = layout, has_exited
        self._lock, self._has_submitted = threading.Lock(), False
        self._is_lost = False
        """Whether the store's host has exited. PyTorch logs a stack trace each time it is asked."""
        self._left: frozenset[int] = frozenset()
        self._looked = -_LOOK_SECONDS

    def submit(self, status: RankStatus) -> None:
        """Report this rank's status. The first one counts; a store that is gone is ignored."""
        with self._lock:
            is_first, self._has_submitted = not self._has_submitted, True
        if is_first:
            with contextlib.suppress(ExchangeError, RuntimeError):
                self._exchange.submit(asdict(status))

    def has_failure(self) -> bool:
        """Returns True once a rank has reported anything other than that it leaves."""
        return any(status.state != LEFT for status in self._submitted_if_any().values())

    def has_gone(self, member: Member) -> bool:
        """Returns True once a rank has exited, or has reported that it leaves. Thread-safe."""
        if self._has_exited(member):
            return True
        now = time.monotonic()
        if now >= self._looked + _LOOK_SECONDS:
            self._looked = now
            statuses = self._submitted_if_any()
            self._left |= {rank for rank, status in statuses.items() if status.state == LEFT}
        return member.rank in self._left

    def collect(self, own: RankStatus, *, seconds: float = _GRACE_SECONDS) -> Report:
        """This rank's status and those that the others report within `seconds`."""
        found = {own.rank: own}
        began = time.monotonic()
        missing = [member for member in self._layout.members if member.rank != own.rank]
        try:
            while missing and time.monotonic() < began + seconds:
                # Ask before reading what it may have said last.
                exited = {member.rank for member in missing if self._has_exited(member)}
                submitted = self._submitted()
                found = submitted if own.rank in submitted else {**submitted, own.rank: own}
                missing = [m for m in missing if m.rank not in {*found, *exited}]
                if missing:
                    time.sleep(_PAUSE_SECONDS)
            store_error = ""
        except ExchangeError as error:
            store_error = "; ".join([*self._ended_with_store(missing), str(error.__cause__)])
        return Report(list(found.values()), store_error)

    def _submitted_if_any(self) -> dict[int, RankStatus]:
        """One small operation while nobody has submitted; nothing where the store is gone."""
        if self._is_lost:
            return {}
        try:
            return self._submitted() if self._exchange.has_begun() else {}
        except (ExchangeError, RuntimeError) as error:
            # One that only hangs may answer later.
            self._is_lost = isinstance(error.__cause__, StoreHostEnded)
            return {}

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
                if self._has_exited(member):
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
