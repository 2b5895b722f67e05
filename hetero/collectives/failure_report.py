"""The error of a failed call: every rank reports its status, and `explain` names the culprit.

A rank whose call fails writes its status to the group's store and sets a failure flag there. Ranks
that are in no call poll the flag and then report their last call. A rank that reports nothing has
ended.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

from hetero.collectives.calls import Call
from hetero.collectives.vendor_layout import Layout, Member
from hetero.errors import LinkError
from hetero.startup.store import BoundedStore, StoreHostEnded
from hetero.text import spans

POLL_SECONDS = 2.0
"""How often a rank that is in no call polls the failure flag."""
_GRACE_SECONDS = 3 * POLL_SECONDS
_FAILURE_FLAG = "failure"
_PAUSE_SECONDS = 0.05

IN_A_CALL, IDLE, LEFT, ABORTED = "in a call", "idle", "left", "aborted"


class CollectiveError(LinkError, dist.DistBackendError):
    """A call of a group failed; the text names the rank at fault, and what each rank called."""


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
                    yield f"{member} has ended, or has left the group"
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
        reasons.append(f"{_names(missing)} said nothing: ended, or out of reach; see its log")
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
