"""The rendezvous of a job's launchers, in rounds: at the start, and after every loss.

In each round every node joins with a `NodeEntry`, and the launcher that hosts the store forms the
`Round` from those that are alive, which all read. A launcher that has to meet the others anew, as
its processes have failed or a node has come back, asks all to leave the round; they then stop their
processes and join the next one. A launcher whose store is lost opens it again until its timeout.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from hetero.errors import UserError, print_line
from hetero.launch.coordinator import Coordinator, Joined
from hetero.launch.exits import ProcessExit, find_cause
from hetero.launch.job_store import JobStore, RendezvousSettings, reporting
from hetero.launch.node_memory import NodeMemory
from hetero.launch.rounds import (
    BACK,
    BEFORE,
    CLOSE_SECONDS,
    CURRENT,
    LOOK_SECONDS,
    OVER,
    REFUSED,
    NodeEntry,
    Round,
    current_round,
    dead_among,
)
from hetero.recover.history import JobHistory
from hetero.startup.store import BoundedStore
from hetero.text import counted, spans

_PREFIX = "hetero/job"
_FIRST = "first"
_TICK_SECONDS = 0.5
"""Between two signs of life of a launcher."""
_SLOW_LOOK_SECONDS = 0.5
_REFUSAL_SECONDS = 2.0
"""For every node that waits to have read why the job is refused."""
_CALL_SECONDS = 20.0
"""For the store to answer one operation."""
_REOPEN_PAUSE = 0.5
_READY_SECONDS = 180.0
"""For a node's processes to import what ranks import, while other nodes train."""


class JobRendezvous(RendezvousHandler):
    """One launcher's side. All methods but `close` are for the agent's thread."""

    def __init__(
        self,
        settings: RendezvousSettings,
        *,
        vendor: str,
        check_abort: Callable[[], None],
        state: Callable[[], Mapping[str, Any]] = dict,
        memory: Callable[[], NodeMemory] = NodeMemory,
        is_ready: Callable[[], bool] = lambda: True,
        newest_state: Callable[[], int | None] = lambda: None,
    ) -> None:
        """
        Args:
            vendor: of this node.
            check_abort: called before this node joins, and while it waits; may raise.
            state: returns what this node holds in memory of the training's state.
            memory: returns what a plan may use of this node.
            is_ready: returns whether this node's ranks would start at once.
            newest_state: returns the iteration of the newest that `state` tells of.
        """
        self._settings, self._check_abort = settings, check_abort
        self._vendor, self._state, self._memory = vendor, state, memory
        self._is_ready, self._newest_state = is_ready, newest_state
        self._opener = JobStore(settings, check_abort=check_abort)
        self._raw: TCPStore | None = None
        self._store: BoundedStore | None = None
        self._coordinator: Coordinator | None = None
        self._ticker: threading.Thread | None = None
        self._token = secrets.token_hex(8)
        self._told: set[str] = set()
        self._exits: list[ProcessExit] = []
        self._noticed: tuple[float, float] | None = None
        """When this launcher noticed a loss, and seconds from that at most."""
        self._formed_at = self._joins_since = 0.0
        self._lost_store = ""
        self._rounds = 0
        self.round: Round | None = None
        """The last one that this node took part in."""
        self._full: Round | None = None
        """The last one that ran the job's own plan."""
        self._meeting_point = RendezvousStoreInfo("", 0)
        self._store_of_ranks: TCPStore | None = None
        """On the first node, which hosts it."""
        self._next_look = 0.0
        self._closed = threading.Event()
        self._is_done = False

    @property
    def node(self) -> int:
        """This node's place in the round."""
        assert self.round is not None
        return [entry.token for entry in self.round.nodes].index(self._token)

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; return when it has been formed with this node in it."""
        self._check_abort()
        self._joins_since = time.monotonic()
        deadline = self._joins_since + self._settings.timeout
        while True:
            try:
                formed = self._join(deadline)
                self._meeting_point = self._open_store_of_ranks(formed)
                break
            except (DistNetworkError, DistStoreError) as error:
                self._lose_store()
                where = f"{self._opener.host_name()} was reached, and then: {error}"
                if not self._settings.restarts or time.monotonic() >= deadline:
                    raise UserError(where) from error
                print_line(f"hetero.run: {where}; waiting for it to come back")
                time.sleep(_REOPEN_PAUSE)
        self.round, self._is_done, self._noticed = formed, False, None
        self._rounds, self._exits, self._lost_store = self._rounds + 1, [], ""
        if not formed.plan:
            self._full = formed
        self._tell_sizes(formed)
        assert self._raw is not None
        return RendezvousInfo(
            PrefixStore(f"round {formed.number}", self._raw),
            self.node,
            len(formed.nodes),
            self._meeting_point,
        )

    def add_exits(self, exits: Sequence[ProcessExit]) -> None:
        """Why this node's processes have failed, before it joins the next round."""
        self._exits = list(exits)

    def notice_loss(self, detection: float) -> None:
        """Note that this node's processes failed up to `detection` seconds ago, the first time."""
        if self._noticed is None:
            self._noticed = (time.monotonic(), detection)

    def num_nodes_waiting(self) -> int:
        """1 if this node has to leave the round, so that its processes start again; else 0."""
        if self.round is None or self._store is None or time.monotonic() < self._next_look:
            return 0
        self._next_look = time.monotonic() + _SLOW_LOOK_SECONDS
        number = self.round.number
        with suppress(DistNetworkError):
            store = self._answering_store()
            if self._settings.restarts and store.check([f"lost/{number}"]):
                return 1
            return int(store.check([f"leave/{number}"]))
        # Whoever hosts it is lost, with the ranks of its node; others may still wait for those.
        return int(self._settings.restarts > 0)

    def is_for_return(self) -> bool:
        """Whether this node has to leave the round for the full plan's, and nothing has failed."""
        assert self.round is not None
        if not self.round.plan:
            return False
        key = f"leave/{self.round.number}"
        with suppress(DistNetworkError):
            store = self._answering_store()
            if store.check([key]):
                self._next_look = 0.0
                return store.get(key).decode() == BACK
        return False

    def all_are_done(self) -> bool:
        """Tell that this node's processes have ended well; return whether those of all have.

        Also true where the others cannot be asked any more, and nothing is started again.
        """
        assert self.round is not None
        if self._store is None:
            return True
        number, count = self.round.number, len(self.round.nodes)
        with suppress(DistNetworkError):
            if not self._is_done:
                self._is_done = True
                if int(self._store.add(f"done/{number}", 1)) == count:
                    self._store.set(f"all done/{number}", "1")
            elif time.monotonic() < self._next_look:
                return False
            elif not self._settings.restarts and self._store.check([f"lost/{number}"]):
                return True
            if not self._store.check([f"all done/{number}"]):
                return False
            self._await_readers(int(self._store.add(f"all done read/{number}", 1)))
            return True
        return not self._settings.restarts

    def _await_readers(self, readers: int) -> None:
        """Keep the store, if this launcher hosts it, until all others have read that it is over."""
        assert self.round is not None
        assert self._store is not None
        key, deadline = f"all done read/{self.round.number}", time.monotonic() + _CALL_SECONDS
        while self._opener.is_host and readers < len(self.round.nodes):
            if time.monotonic() > deadline or self._store.check([f"lost/{self.round.number}"]):
                return
            time.sleep(LOOK_SECONDS)
            readers = int(self._store.add(key, 0))

    def tell_over(self, text: str) -> None:
        """Tell nodes that wait that the job has ended. Never raises."""
        with suppress(DistNetworkError):
            self._answering_store().set(OVER, text)

    def has_lost_node(self) -> bool:
        """Whether the launcher of another node of the round is known to be lost."""
        assert self.round is not None
        with suppress(DistNetworkError):
            return bool(self._answering_store().check([f"lost/{self.round.number}"]))
        return False

    def close(self) -> None:
        """End this launcher's threads. The store ends with the process that hosts it.

        A thread inside PyTorch when the interpreter ends would abort the process.
        """
        self._closed.set()
        if self._coordinator is not None:
            self._coordinator.close()
        if self._ticker is not None:
            self._ticker.join(CLOSE_SECONDS)

    def get_backend(self) -> str:
        return self._settings.backend

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._closed.is_set()

    def set_closed(self) -> None:
        self._closed.set()

    def get_run_id(self) -> str:
        return self._settings.job

    def shutdown(self) -> bool:
        return True

    def _join(self, deadline: float) -> Round:
        store = self._opened(deadline)
        self._require_signs()
        self._require_equal_flags(store)
        if self._settings.is_static and self._settings.nodes > 1:
            self._claim_number(store)
        self._require_signs()
        while True:
            current = current_round(store)
            number = 1 if current is None else current.number + 1
            if current is None and self.round is not None:
                known = [None if one is None else asdict(one) for one in (self.round, self._full)]
                store.compare_set(BEFORE, "", json.dumps(known))
            place = int(store.add(f"join/{number}/count", 1))
            store.set(f"join/{number}/{place}", json.dumps(asdict(self._entry())))
            formed = self._await_round(store, number, deadline, current=current)
            if self._takes_part(formed):
                self._formed_at = time.monotonic()
                return formed
            if "spare" not in self._told:
                self._told.add("spare")
                what = "as a spare" if self._settings.has_spares else "for a place"
                nodes = counted(len(formed.nodes), "node")
                print_line(f"hetero.run: the job runs on {nodes}; this one waits {what}")

    def _open_store_of_ranks(self, formed: Round) -> RendezvousStoreInfo:
        """Where the ranks of this round meet.

        At first at the store of the launchers, of whose port a user knows; later at one of their
        own, or they would find the keys of the round before.
        """
        assert self._store is not None
        key = f"store of ranks/{formed.number}"
        if formed.nodes[0].token != self._token:
            self._store.wait([key], timedelta(seconds=_CALL_SECONDS))
            return RendezvousStoreInfo(**json.loads(self._store.get(key)))
        address = formed.nodes[0].address or self._settings.host_and_port[0]
        assert self._raw is not None
        port = self._raw.port
        if formed.number > 1 or not self._opener.is_host:
            limit = timedelta(seconds=self._settings.timeout)
            self._store_of_ranks = TCPStore(address, 0, None, True, limit, wait_for_workers=False)
            port = self._store_of_ranks.port
        info = RendezvousStoreInfo(address, port)
        self._store.set(key, json.dumps(asdict(info)))
        return info

    def _history(self) -> JobHistory | None:
        """Of now; None before the first round."""
        if self.round is None:
            return None
        history = JobHistory.from_record(self.round.history)
        return replace(history, elapsed=history.elapsed + time.monotonic() - self._formed_at)

    def _entry(self) -> NodeEntry:
        settings, memory, history = self._settings, self._memory(), self._history()
        at, detection = self._noticed or (None, 0.0)
        return NodeEntry(
            token=self._token,
            host=socket.gethostname(),
            number=settings.node_rank if settings.is_static else -1,
            processes=settings.processes,
            vendor=self._vendor,
            accelerator=memory.accelerator,
            memory=memory.bytes,
            address=settings.address or "",
            rounds=self._rounds,
            place=-1 if self.round is None else self.node,
            failures=0 if self.round is None else self.round.failures,
            job="" if self.round is None else self.round.job,
            lost_store=self._lost_store,
            exit=asdict(find_cause(self._exits)) if self._exits else None,
            state=self._state(),
            history={} if history is None else history.to_record(),
            noticed=None if at is None else time.monotonic() - at,
            detection=detection,
            waited=time.monotonic() - self._joins_since,
        )

    def _takes_part(self, formed: Round | None) -> bool:
        return formed is not None and self._token in [entry.token for entry in formed.nodes]

    def _ask_to_leave(self, store: BoundedStore, current: Round | None) -> None:
        """Have those that are in a round join the next one, if this node is to be in it."""
        if current is None:
            return
        settings, key = self._settings, f"leave/{current.number}"
        if self._takes_part(current):
            cause = f"{find_cause(self._exits).sentence()}" if self._exits else "a node left"
            store.compare_set(key, "", cause)
            return
        if current.plan:
            return  # the coordinator decides when the full plan can run again
        if settings.is_static:
            has_place = any(
                entry.number == settings.node_rank and self._holder(store) == self._token
                for entry in current.nodes
            )
        else:
            has_place = not settings.has_spares and len(current.nodes) < settings.nodes
            if not has_place:
                dead = dead_among(store, [entry.token for entry in current.nodes])
                lost = [entry for entry in current.nodes if entry.token in dead]
                has_place = any(entry.vendor == self._vendor for entry in lost)
        if has_place:
            store.compare_set(key, "", f"the node {socket.gethostname()} came")

    def _await_round(
        self, store: BoundedStore, number: int, deadline: float, *, current: Round | None
    ) -> Round:
        """Wait until the round is formed. UserError at the deadline, or if the job is refused.

        Nodes that train in the `current` round, without this one, are asked to leave it once the
        ranks of this node would start at once.
        """
        key, has_asked = f"formed/{number}", False
        latest_request = time.monotonic() + _READY_SECONDS
        coordinator = self._coordinator
        with reporting(
            lambda: self._awaited(store, number, current), is_on=self._settings.nodes > 1
        ):
            while not store.check([key]):
                if not has_asked and (
                    self._takes_part(current)
                    or self._is_ready()
                    or time.monotonic() > latest_request
                ):
                    has_asked = True
                    store.set(f"ready/{self._token}", "1")
                    self._ask_to_leave(store, current)
                self._check_abort()
                self._require_signs()
                if store.check([REFUSED]):
                    text = store.get(REFUSED).decode()
                    if self._opener.is_host:
                        time.sleep(_REFUSAL_SECONDS)  # the store ends with this process
                    raise UserError(text)
                if store.check([OVER]):
                    print_line(f"hetero.run: {store.get(OVER).decode()}")
                    raise RendezvousGracefulExitError("the job has ended")
                may_wait = self._settings.has_spares or self._settings.may_fall_back
                runs_without = current is not None and not self._takes_part(current)
                if time.monotonic() >= deadline and not (may_wait and runs_without):
                    text = self._lateness(store, number)
                    if coordinator is not None:
                        self._refuse(store, text)
                    raise UserError(text)
                time.sleep(LOOK_SECONDS)
        return Round.from_record(json.loads(store.get(key)))

    def _lateness(self, store: BoundedStore, number: int) -> str:
        settings, missing = self._settings, self._missing(store, number)
        seconds, unfit = f"{settings.timeout:g} s", f"unfit/{number}"
        if settings.is_static:
            found = f", and {store.get(unfit).decode()}" if store.check([unfit]) else ""
            return (
                f"{missing} did not come within {seconds} while the nodes met at "
                f"{self._opener.own_endpoint()}; see that every node was started and can reach it"
                f"{found}"
            )
        return (
            f"fewer than {settings.least} nodes came to "
            f"{settings.endpoint} in time ({seconds}); see that each was started, and can reach it"
        )

    def _awaited(self, store: BoundedStore, number: int, current: Round | None) -> str | None:
        settings = self._settings
        if current is not None and not self._takes_part(current):
            nodes = counted(len(current.nodes), "node")
            return f"a place in the job, which runs on {nodes}"
        if not settings.is_static:
            return f"the other nodes ({settings.nodes} in all) at {settings.endpoint}"
        missing = self._missing_numbers(store, number)
        if settings.node_rank == 0:
            named = self._missing(store, number)
            return f"{named} at {self._opener.own_endpoint()}" if missing else None
        return f"{self._opener.host_name()}, where another job may listen" if 0 in missing else None

    def _missing(self, store: BoundedStore, number: int) -> str:
        """Missing nodes with their first rank, which the nodes before have told."""
        missing = self._missing_numbers(store, number)
        if not missing:
            return "a node that had come"
        joined = {entry.number: entry for entry in Joined(store, number).look()}
        before = sum(joined[node].processes for node in range(missing[0]) if node in joined)
        size = self._settings.least
        return f"{spans(missing, 'node')} of {size} (from rank {before} on)"

    def _missing_numbers(self, store: BoundedStore, number: int) -> list[int]:
        joined = {entry.number for entry in Joined(store, number).look()}
        size = self._settings.least
        return sorted(set(range(size)) - joined)

    def _opened(self, deadline: float) -> BoundedStore:
        if self._store is not None:
            return self._store
        self._raw = self._opener.open(max(1.0, deadline - time.monotonic()))
        store = PrefixStore(_PREFIX, self._raw)
        self._store = BoundedStore(store, seconds=_CALL_SECONDS)
        # Connections of their own: an operation of the agent's may last.
        ticks = BoundedStore(store.clone(), seconds=_CALL_SECONDS)  # type: ignore[attr-defined]
        self._ticker = threading.Thread(
            target=self._tick, args=(ticks, self._raw), name="launcher's ticks", daemon=True
        )
        self._ticker.start()
        if self._opener.is_host:
            looks = BoundedStore(store.clone(), seconds=_CALL_SECONDS)  # type: ignore[attr-defined]
            self._coordinator = Coordinator(self._settings, looks, newest_state=self._newest_state)
        return self._store

    def _lose_store(self) -> None:
        if self.round is not None and not self._opener.is_host:
            here = f"node {self.node} on {socket.gethostname()}"
            self._lost_store = f"{here} lost its connection to {self._opener.host_name()}"
            self.notice_loss(0.0)
        if self._coordinator is not None:
            self._coordinator.close()
        self._store = self._raw = self._coordinator = None

    def _tick(self, store: BoundedStore, raw: TCPStore) -> None:
        """Show that this launcher is alive, as long as it uses this store."""
        count, twice = 0, f"twice {self._settings.node_rank}"
        with suppress(DistNetworkError):
            while self._raw is raw and not self._closed.is_set():
                count += 1
                store.set(f"alive/{self._token}", str(count))
                if "twice" not in self._told and store.check([twice]):
                    self._told.add("twice")
                    print_line(f"hetero.run: {store.get(twice).decode()}")
                self._closed.wait(_TICK_SECONDS)

    def _require_signs(self) -> None:
        """Raise DistNetworkError if no sign of life arrives any more.

        Others take this launcher for dead then, although its other connection may still be good.
        """
        if self._ticker is None or not self._ticker.is_alive():
            raise DistNetworkError(f"it did not take a sign of life within {_CALL_SECONDS:g} s")

    def _answering_store(self) -> BoundedStore:
        """The store. DistNetworkError if it is lost, or takes no sign of life any more."""
        if self._store is None:
            raise DistNetworkError("the store is lost")
        self._require_signs()
        return self._store

    def _holder(self, store: BoundedStore) -> str:
        return store.get(f"holder/{self._settings.node_rank}").decode()

    def _claim_number(self, store: BoundedStore) -> None:
        """Be the launcher of this node's number, unless another one that lives is."""
        settings = self._settings
        key = f"holder/{settings.node_rank}"
        holder = store.compare_set(key, "", self._token).decode()
        if holder == self._token:
            return
        refusal = UserError(
            f"another launcher is node {settings.node_rank} at {settings.endpoint} already; "
            "give each node its own --node-rank, and each job its own --master-port"
        )
        try:
            lives = not dead_among(store, [holder])
        except DistNetworkError as error:  # the job has ended meanwhile
            if settings.restarts:
                raise
            raise refusal from error
        if lives:
            # It may be of a job that runs well: it is told, and goes on.
            store.set(
                f"twice {settings.node_rank}",
                f"another launcher, on {socket.gethostname()}, was refused because it says that it "
                f"is node {settings.node_rank} too; give each node its own --node-rank",
            )
            raise refusal
        if store.compare_set(key, holder, self._token).decode() != self._token:
            self._claim_number(store)

    def _require_equal_flags(self, store: BoundedStore) -> None:
        """Refuse the job, on all nodes that wait, if they were started with different flags.

        Before this node counts as there: those with a smaller --nnodes would go on.
        """
        settings, host = self._settings, socket.gethostname()
        is_static = settings.is_static
        name = f"node {settings.node_rank} on {host}" if is_static else f"the node {host}"
        mine = {"name": name, "flags": dict(settings.common)}
        first = json.loads(store.compare_set(_FIRST, "", json.dumps(mine)))
        differing = {
            flag: value
            for flag, value in settings.common.items()
            if first["flags"].get(flag) != value
        }
        if not differing:
            return
        theirs = " ".join(f"{flag} {first['flags'].get(flag)}" for flag in differing)
        ours = " ".join(f"{flag} {value}" for flag, value in differing.items())
        text = (
            f"{first['name']} was started with {theirs} and {name} with {ours}; give every node "
            "the same"
        )
        if not store.check([CURRENT]):
            self._refuse(store, text)
        raise UserError(text)

    def _refuse(self, store: BoundedStore, text: str) -> None:
        store.set(REFUSED, text)
        if self._opener.is_host:
            time.sleep(_REFUSAL_SECONDS)  # the store ends with the process that hosts it

    def _tell_sizes(self, formed: Round) -> None:
        """Say on every node how many ranks each starts, where they differ.

        They may, and then the number of all ranks is not the one that a mistyped flag was to give.
        """
        counts = [entry.processes for entry in formed.nodes]
        if formed.number == 1 and len(set(counts)) > 1:
            each = ", ".join(
                f"node {number} on {entry.host} {entry.processes}"
                for number, entry in enumerate(formed.nodes)
            )
            print_line(
                f"hetero.run: the nodes start different numbers of ranks (--nproc-per-node): "
                f"{each}; {sum(counts)} in all"
            )
