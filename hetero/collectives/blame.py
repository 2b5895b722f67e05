"""Who is to blame when a call fails: what every rank says of itself, and what follows from it.

A rank whose call fails says so in the group's store and raises an alarm there. Ranks that are in no
call look for the alarm from time to time and say what they called last. Who says nothing has ended.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

from hetero.collectives.calls import Call
from hetero.collectives.vendor_layout import Layout, Member
from hetero.errors import LinkError
from hetero.store import BoundedStore, StoreSilent
from hetero.waiting import spans

LOOK_SECONDS = 2.0
"""Between two looks of a rank that is in no call."""
_GRACE_SECONDS = 3 * LOOK_SECONDS
_ALARM = "alarm"
_PAUSE_SECONDS = 0.05

IN_A_CALL, IDLE, LEFT, ABORTED = "in a call", "idle", "left", "aborted"


class CollectiveError(LinkError, dist.DistBackendError):
    """A call of a group failed; its text names the rank at fault, and what each rank called."""


@dataclass(frozen=True)
class Statement:
    """What one rank says of itself when something has failed."""

    rank: int
    """In the group."""
    state: str
    """IN_A_CALL, IDLE, LEFT or ABORTED."""
    call: Call | None
    """The call that failed, or the last one that was made."""
    error: str = ""
    order: int = 0
    """Which alarm it came with: the first tells the cause, later ones what followed."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes | str) -> Statement:
        values: dict[str, Any] = json.loads(text)
        if values["call"] is not None:
            values["call"] = Call.from_dict(values["call"])
        return cls(**values)


@dataclass(frozen=True)
class Heard:
    """What the ranks of a group have said."""

    statements: Sequence[Statement]
    store_silent: str = ""
    """Why nobody could be heard, where that is so."""


class Blackboard:
    """Where the ranks of one group make their statements."""

    def __init__(self, store: dist.Store, layout: Layout) -> None:
        # A caller's next call waits for a look to end.
        self._store, self._layout = BoundedStore(store, seconds=LOOK_SECONDS), layout

    def state(self, statement: Statement, *, alarm: bool = False) -> Statement:
        """Make this rank's statement. A store that is gone cannot hear it."""
        with contextlib.suppress(RuntimeError):
            if alarm:
                statement = replace(statement, order=self._store.add(_ALARM, 1))
            self._store.set(self._key(statement.rank), statement.encode())
        return statement

    def alarmed(self) -> bool:
        try:
            return self._store.check([_ALARM])
        except RuntimeError:
            return False

    def collect(self, own: Statement, *, seconds: float = _GRACE_SECONDS) -> Heard:
        """What all say within so long, this rank itself included."""
        heard = {own.rank: own}
        deadline = time.monotonic() + seconds
        try:
            while len(heard) < self._layout.size and time.monotonic() < deadline:
                for member in self._layout.members:
                    if member.rank not in heard and self._store.check([self._key(member.rank)]):
                        text = self._store.get(self._key(member.rank))
                        heard[member.rank] = Statement.decode(text)
                if len(heard) < self._layout.size:
                    time.sleep(_PAUSE_SECONDS)
        except StoreSilent as silent:
            return Heard([own], str(silent))
        except RuntimeError:
            pass  # The store's host has ended, and what was heard before is what there is.
        return Heard([heard[rank] for rank in sorted(heard)])

    @staticmethod
    def _key(rank: int) -> str:
        return f"statement/{rank}"


def explain(group: str, layout: Layout, heard: Heard, *, own: Statement, timeout: float) -> str:
    """One sentence on what happened, from whatever was said. Pure."""
    statements = heard.statements
    me = layout.members[layout.rank]
    called = f"{own.call}" if own.call else "a call"
    opening = f"{called} of group {group}, whose timeout is {timeout:g} s, failed on {me}"
    silent = [m for m in layout.members if m.rank not in {s.rank for s in statements}]
    in_call = [s for s in statements if s.state == IN_A_CALL and s.call is not None]
    reasons = []
    if heard.store_silent:
        reasons.append(heard.store_silent)
    elif silent:
        reasons.append(f"{_names(silent)} said nothing: ended, or out of reach; see its log")
    reached = max((s.call.sequence for s in in_call if s.call), default=0)
    # Where a rank has ended, one that is a call behind is no other cause.
    abreast = [s for s in in_call if not silent or (s.call and s.call.sequence == reached)]
    if len(different := _by_call(layout, abreast)) > 1:
        reasons.append(
            "the ranks called different things: "
            + "; ".join(f"{names} called {call}" for call, names in different.items())
            + "; make every rank call the same operations in the same order"
        )
    aborting = [layout.members[s.rank] for s in statements if s.state == ABORTED]
    if aborting:
        reasons.append(f"{_names(aborting)} aborted the group")
    for state, what in ((IDLE, "is in no call"), (LEFT, "has left the group")):
        for statement in statements:
            done = statement.call.sequence if statement.call else 0
            if statement.state == state and done < reached:
                after = f" since {statement.call}" if statement.call else ""
                reasons.append(f"{layout.members[statement.rank]} {what}{after}")
    if not reasons:
        failed = sorted((s for s in statements if s.error), key=lambda s: s.order)
        reasons += [f"{layout.members[s.rank]}: {s.error}" for s in failed[:1]]
    own_words = f" ({own.error})" if own.error and own.error not in reasons[0] else ""
    return f"{opening}: {'; '.join(reasons)}{own_words}"


def _by_call(layout: Layout, statements: Sequence[Statement]) -> Mapping[str, str]:
    """The ranks by what they say that they called."""
    ranks: dict[str, list[int]] = {}
    for statement in statements:
        ranks.setdefault(str(statement.call), []).append(layout.members[statement.rank].global_rank)
    return {call: spans(numbers) for call, numbers in ranks.items()}


def _names(members: Sequence[Member]) -> str:
    return ", ".join(map(str, members))
