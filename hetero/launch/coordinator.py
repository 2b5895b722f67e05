"""Forms the rounds of a job, on the launcher that hosts the store."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace

from torch.distributed import DistNetworkError

from hetero.errors import UserError, print_line
from hetero.launch.exits import ProcessExit, find_cause
from hetero.launch.fallback import ChosenPlan
from hetero.launch.job_store import RendezvousSettings
from hetero.launch.plan_search import Layout, PlanSearch
from hetero.launch.rounds import (
    BACK,
    BEFORE,
    CLOSE_SECONDS,
    CURRENT,
    DEAD_SECONDS,
    LOOK_SECONDS,
    MOST_TEXT,
    REFUSED,
    NodeEntry,
    Round,
)
from hetero.recover.history import Attempt, JobHistory, RestartIncident
from hetero.startup.store import BoundedStore

_LOST_SECONDS = 10.0
"""Without a sign of life of a launcher that takes part, after which its node counts as lost."""
_WATCH_SECONDS = 1.0
_STATE_SECONDS = 300.0
"""For the next state in memory, before nodes leave a fallback plan without it."""


class Coordinator:
    """A thread of the launcher that hosts the store: forms each round."""

    def __init__(
        self,
        settings: RendezvousSettings,
        store: BoundedStore,
        *,
        newest_state: Callable[[], int | None],
    ) -> None:
        """`newest_state`: returns the iteration of this node's newest state in memory, if any."""
        self._settings, self._store = settings, store
        self._newest_state = newest_state
        self._could_return: tuple[float, int | None] | None = None
        """Since when, and the newest state then."""
        self._signs: dict[str, tuple[bytes, float]] = {}
        """By token: the last sign of life, and when it was new."""
        self._previous: Round | None = None
        self._full: Round | None = None
        """The last one that ran the job's own plan."""
        self._formed: Round | None = None
        """The last one, if it met at this store."""
        self._formed_at = 0.0
        self._complete_since: float | None = None
        self._joined = Joined(store, 1)
        self._next_watch, self._has_lost = 0.0, False
        self._search: PlanSearch | None = None
        if settings.planner is not None:
            self._search = PlanSearch(settings.planner)
        self._is_checked = False
        """Whether there are plans for the loss of a vendor."""
        self._noticed_at: float | None = None
        """When this thread noticed by itself that the nodes have to meet anew."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        with suppress(DistNetworkError):
            while not self._closed.wait(LOOK_SECONDS):
                now = time.monotonic()
                if self._formed is not None and now >= self._next_watch:
                    self._watch(self._formed, now)
                    self._next_watch = now + _WATCH_SECONDS
                if not (joined := self._joined.look()):
                    continue
                # A launcher tells of rounds at an earlier store before it joins.
                if self._previous is None and self._store.check([BEFORE]):
                    self._previous, self._full = _rounds_before(self._store)
                live = [one for one in joined if self._silence(one.token, now) < DEAD_SECONDS]
                if (chosen := self._choose(live, now)) is not None:
                    if self._may_begin(chosen):
                        self._form(self._joined.number, chosen)
                elif (fallback := self._fall_back(live, now)) is not None:
                    self._form(self._joined.number, fallback.nodes, fallback)
                elif self._may_return(live, now):
                    assert self._formed is not None
                    self._noticed_at = self._noticed_at or now
                    self._store.compare_set(f"leave/{self._formed.number}", "", BACK)

    def _watch(self, formed: Round, now: float) -> None:
        """Mark the round as lost once a launcher of it has given no sign of life."""
        silent = [one for one in formed.nodes if self._silence(one.token, now) >= _LOST_SECONDS]
        if silent and not self._has_lost:
            self._has_lost = True
            self._noticed_at = self._noticed_at or now
            who = ", ".join(f"node {self._place(one)} on {one.host}" for one in silent)
            self._store.set(f"lost/{formed.number}", f"nothing is heard of {who}")

    def _may_begin(self, nodes: Sequence[NodeEntry]) -> bool:
        """Whether the loss of a vendor has been planned for. Refuses a job that survives none."""
        has_run = self._previous is not None or any(entry.rounds for entry in nodes)
        if self._search is None or self._is_checked or has_run:
            return True
        found: dict[str, ChosenPlan[NodeEntry] | UserError] = {}
        for vendor in dict.fromkeys(entry.vendor for entry in nodes):
            plan = self._plan_for([entry for entry in nodes if entry.vendor != vendor])
            if plan is None:
                return False
            found[vendor] = plan
        if not any(isinstance(one, ChosenPlan) for one in found.values()):
            self._store.set(REFUSED, "; ".join(f"without {v}: {e}" for v, e in found.items()))
            return False
        self._is_checked = True
        for vendor, plan in found.items():
            what = plan.name if isinstance(plan, ChosenPlan) else f"none: {plan}"
            print_line(f"hetero.run: without {vendor} the plan is {what}")
        print_line(f"hetero.run: for the choice of plans {self._search.assumption(nodes)}")
        return True

    def _plan_for(self, nodes: Sequence[NodeEntry]) -> ChosenPlan[NodeEntry] | UserError | None:
        """The first fallback plan for nodes, in their order.

        The error if none fits; None while the planner searches.
        """
        for fallback in self._settings.fallbacks:
            if (chosen := fallback.choose(nodes)) is not None:
                return chosen
        if self._search is None or not nodes:
            return UserError("the nodes that are left are too few for any fallback plan")
        layout = self._search.outcome(nodes)
        return layout.on(nodes) if isinstance(layout, Layout) else layout

    def _fall_back(self, live: Sequence[NodeEntry], now: float) -> ChosenPlan[NodeEntry] | None:
        """The fallback plan for the nodes that are there.

        None as long as a node may join that is needed for the full plan.
        """
        if self._previous is None:
            return None
        joined = {entry.token for entry in live}
        left = [one for one in self._previous.nodes if one.token not in joined]
        silent = [one for one in left if self._is_gone(one, now)]  # each is looked at
        if len(silent) < len(left):
            return None
        plan = self._plan_for(self._ordered(live))
        if isinstance(plan, UserError) and self._search is not None:
            key = f"unfit/{self._joined.number}"
            if not self._store.check([key]):
                self._store.set(key, str(plan))
                print_line(f"hetero.run: {plan}; waiting for lost nodes")
        return plan if isinstance(plan, ChosenPlan) else None

    def _may_return(self, live: Sequence[NodeEntry], now: float) -> bool:
        """Whether the full plan's nodes are there: those that train, and others that can start."""
        seconds, formed = self._settings.return_seconds, self._formed
        if formed is None or not formed.plan or seconds is None:
            return False
        training = [one for one in formed.nodes if self._silence(one.token, now) < DEAD_SECONDS]
        known = {node.token for node in training}
        waiting = [
            one
            for one in live
            if one.token not in known and self._store.check([f"ready/{one.token}"])
        ]
        has_all = self._choose([*training, *waiting], now) is not None
        if not has_all or now - self._formed_at < seconds:
            self._could_return = None
            return False
        # What is trained after the newest state is repeated, so they leave after another one.
        newest = self._newest_state()
        if self._could_return is None:
            self._could_return = (now, newest)
        since, first = self._could_return
        return newest is None or newest != first or now - since >= _STATE_SECONDS

    def _form(
        self,
        number: int,
        nodes: Sequence[NodeEntry],
        plan: ChosenPlan[NodeEntry] | None = None,
    ) -> None:
        lost = self._lost(nodes)
        has_failed = bool(lost) or any(entry.exit or entry.lost_store for entry in nodes)
        failures = max(entry.failures for entry in nodes)
        has_run = max(entry.rounds for entry in nodes) > 0
        job = next((entry.job for entry in nodes if entry.job), "")
        reason = self._reason(nodes, lost, plan) if has_run else ""
        formed = Round(
            number=number,
            nodes=tuple(replace(entry, history={}) for entry in nodes),
            job=job or secrets.token_hex(8),
            failures=failures + int(has_run and has_failed),
            starts=0 if self._previous is None else self._previous.starts + 1,
            plan="" if plan is None else plan.name,
            plan_text="" if plan is None else plan.text,
            reason=reason,
            history=self._history(nodes, lost, reason).to_record(),
        )
        self._store.set(f"formed/{number}", json.dumps(asdict(formed)))
        self._store.set(CURRENT, str(number))
        self._previous = self._formed = formed
        self._complete_since = None
        self._formed_at = time.monotonic()
        if plan is None:
            self._full = formed
        self._joined, self._has_lost = Joined(self._store, number + 1), False
        self._noticed_at = self._could_return = None

    def _history(
        self, nodes: Sequence[NodeEntry], lost: Sequence[NodeEntry], reason: str
    ) -> JobHistory:
        """Of the job, as a round of `nodes` begins."""
        now, arrivals = time.monotonic(), self._joined.arrivals
        # All in seconds before now.
        told = [
            (JobHistory.from_record(entry.history), now - arrivals[entry.token], entry)
            for entry in nodes
            if entry.history
        ]
        if not told:
            return JobHistory()
        history, since, _ = max(told, key=lambda one: one[0].restarts)
        # A node that took no part in the round before it knows less.
        left = [(age, entry) for own, age, entry in told if own.restarts == history.restarts]
        attempt = max(
            (Attempt(**entry.state["attempt"]) for _, entry in left if entry.state.get("attempt")),
            key=lambda one: one.iteration,
            default=None,
        )
        noticed = [age + one.noticed for age, one in left if one.noticed is not None]
        happened = [
            age + one.noticed + one.detection for age, one in left if one.noticed is not None
        ]
        happened += [self._silence(one.token, now) for one in lost]
        if self._noticed_at is not None:
            noticed.append(now - self._noticed_at)
        joined = [age + one.waited for age, one in left]
        first = max(noticed, default=max(joined))
        ago = max([first, *happened])
        met = min([first, *joined])
        elapsed = history.elapsed + since
        incident = RestartIncident(
            reason=reason[:MOST_TEXT],
            at=elapsed - ago,
            iteration=history.reached(attempt),
            detection_seconds=ago - first,
            teardown_seconds=first - met,
            rendezvous_seconds=met,
        )
        return replace(history.completed(attempt), elapsed=elapsed).with_incident(incident)

    def _reason(
        self,
        nodes: Sequence[NodeEntry],
        lost: Sequence[NodeEntry],
        plan: ChosenPlan[NodeEntry] | None,
    ) -> str:
        exits = [ProcessExit.from_record(one.exit) for one in nodes if one.exit is not None]
        told = [f"node {self._place(entry)} on {entry.host} was lost" for entry in lost]
        if not lost:
            told += sorted({entry.lost_store for entry in nodes if entry.lost_store})[:1]
        if exits:
            cause = find_cause([one for one in exits if one.is_cause] or exits)
            # What the processes of other nodes say of a lost one says less.
            if cause.is_fatal or not told:
                told.insert(0, _first_line(cause.sentence()))
        if not told and self._previous is not None and self._previous.plan:
            told = [BACK if plan is None else "nodes that were back are lost again"]
        if not told:
            new = [entry for entry in nodes if entry.rounds == 0]
            told = [f"the node {entry.host} came" for entry in new] or ["a node left"]
        return "; ".join(told)

    def _place(self, lost: NodeEntry) -> int:
        assert self._previous is not None
        return self._previous.nodes.index(lost)

    def _lost(self, nodes: Sequence[NodeEntry]) -> list[NodeEntry]:
        """Those of the previous round whose launchers are not in this one."""
        if self._previous is None:
            return []
        tokens = {entry.token for entry in nodes}
        return [entry for entry in self._previous.nodes if entry.token not in tokens]

    def _choose(self, live: Sequence[NodeEntry], now: float) -> list[NodeEntry] | None:
        """The nodes of the round in the order of their ranks; None if some are missing."""
        settings = self._settings
        least = settings.least
        is_fixed = least == settings.nodes or settings.has_spares
        if is_fixed and self._full is not None:
            return self._in_their_places(live, now)
        if settings.is_static:
            by_number = {entry.number: entry for entry in live}
            chosen = [by_number[number] for number in range(least) if number in by_number]
            return chosen if len(chosen) == least else None
        ordered = self._ordered(live)
        if len(live) < least:
            self._complete_since = None
            return None
        if settings.has_spares:
            return ordered[:least]
        if len(live) < settings.nodes:
            self._complete_since = self._complete_since or now
            if now - self._complete_since < settings.last_call:
                return None
        return ordered[: settings.nodes]

    def _ordered(self, live: Sequence[NodeEntry]) -> list[NodeEntry]:
        """Those that took part before as they were; the others by their numbers.

        Without numbers by address, then as they came.
        """

        def key(entry: NodeEntry) -> tuple[bool, int, str]:
            place = entry.place if entry.place >= 0 else entry.number
            return place < 0, place, entry.address or entry.host

        return sorted(live, key=key)

    def _in_their_places(self, live: Sequence[NodeEntry], now: float) -> list[NodeEntry] | None:
        """Each node of the full plan where it was, or what takes the place of a lost one."""
        assert self._full is not None
        by_token = {entry.token: entry for entry in live}
        old_tokens = {entry.token for entry in self._full.nodes}
        new = [entry for entry in live if entry.token not in old_tokens]
        chosen = []
        for old in self._full.nodes:
            entry = by_token.get(old.token)
            if entry is None and old.number >= 0:
                entry = next((one for one in reversed(new) if one.number == old.number), None)
            if entry is None and self._is_gone(old, now):
                entry = next((one for one in new if self._can_replace(one, old)), None)
            if entry is None:
                return None
            chosen.append(entry)
            new = [one for one in new if one is not entry]
        return chosen

    def _is_gone(self, node: NodeEntry, now: float) -> bool:
        """Whether a node of an earlier round has given no sign of life for long.

        For longer at a new store, to which others are on their way.
        """
        longest = _LOST_SECONDS if self._formed is None else DEAD_SECONDS
        return self._silence(node.token, now) >= longest

    def _can_replace(self, entry: NodeEntry, old: NodeEntry) -> bool:
        least = self._settings.least
        is_owner_of_another = 0 <= entry.number < least
        return (
            entry.vendor == old.vendor
            and entry.processes == old.processes
            and not is_owner_of_another
        )

    def _silence(self, token: str, now: float) -> float:
        """Seconds since the last new sign of life of a launcher."""
        key = f"alive/{token}"
        sign = self._store.get(key) if self._store.check([key]) else b""
        known = self._signs.get(token)
        if known is None or known[0] != sign:
            self._signs[token] = known = (sign, now)
        return now - known[1]


class Joined:
    """Those that join a round, read as they come."""

    def __init__(self, store: BoundedStore, number: int) -> None:
        self.number, self._store = number, store
        self._read: dict[int, NodeEntry] = {}
        """By their order."""
        self.arrivals: dict[str, float] = {}
        """By token: when the last entry was read."""

    def look(self) -> list[NodeEntry]:
        """The last entry of each launcher, first come first."""
        key = f"join/{self.number}/count"
        count = int(self._store.add(key, 0)) if self._store.check([key]) else 0
        for place in range(1, count + 1):
            key = f"join/{self.number}/{place}"
            # A launcher may have ended before it said who it is.
            if place not in self._read and self._store.check([key]):
                entry = NodeEntry(**json.loads(self._store.get(key)))
                self._read[place] = entry
                self.arrivals[entry.token] = time.monotonic()
        last = {entry.token: place for place, entry in sorted(self._read.items())}
        return [self._read[place] for place in sorted(last.values())]


def _first_line(text: str) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= MOST_TEXT else f"{line[:MOST_TEXT]} ..."


def _rounds_before(store: BoundedStore) -> tuple[Round, Round | None]:
    """The last round that met at an earlier store, and the last that ran the job's own plan."""
    last, full = json.loads(store.get(BEFORE))
    return Round.from_record(last), None if full is None else Round.from_record(full)
