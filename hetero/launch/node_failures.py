"""Exchanges between the launchers of a job's nodes why a node's processes failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousInfo

from hetero.errors import ExchangeError
from hetero.launch.exits import ProcessExit
from hetero.startup.exchange import Exchange
from hetero.startup.store import BoundedStore, over_own_connection

_PAUSE = 0.2
GRACE = 15.0
"""Seconds for this node's processes to end by themselves after those of another node failed."""
_TIMEOUT = GRACE + 5.0
"""Seconds for the launchers of the other nodes to notice a failure, after their own grace."""
_OTHERS_SECONDS = 5.0
"""For the reports of the others where the launcher of one is lost, and so the cause is known."""
_CALL_SECONDS = 5.0
"""For the store to answer; after that this node does without it."""


class NodeFailures:
    """One launcher's side, over the store of its rendezvous.

    It only makes the last line more helpful, so its own errors are ignored.
    """

    def __init__(
        self, info: RendezvousInfo, *, has_lost_node: Callable[[], bool] = lambda: False
    ) -> None:
        """Raises DistNetworkError if the store does not answer.

        `has_lost_node` returns whether another node's launcher is known to be lost.
        """
        # Keep a reference: on node 0 this object hosts the store of all nodes.
        self._hosting, self._has_lost_node = info.store, has_lost_node
        # torchelastic may block the other connection for minutes.
        own = over_own_connection(
            PrefixStore("hetero/node failures", info.store), seconds=_CALL_SECONDS
        )
        store = BoundedStore(own, seconds=_CALL_SECONDS)
        # A node submits how its processes failed, or nothing once they have ended well.
        self._exits = Exchange(store, "exits", member=info.rank, size=info.world_size)
        self._ends = Exchange(store, "ends", member=info.rank, size=info.world_size)
        self._node, self._size = info.rank, info.world_size
        self._stopped = threading.Event()
        self._has_failed, self._is_lost = False, False
        """Whether this node has reported a failure, and whether the store is lost."""
        self._deadline: float | None = None
        self.remote_cause: ProcessExit | None = None
        """The other node's failed process after which this node's were terminated."""

    def watch(self, terminate: Callable[[], None]) -> None:
        """Call `terminate` if another node's process failed and this node's still run later."""
        threading.Thread(
            target=self._watch, args=(terminate,), name="node failures", daemon=True
        ).start()

    def _watch(self, terminate: Callable[[], None]) -> None:
        others: dict[int, ProcessExit] = {}
        while not (others or self._stopped.wait(_PAUSE)):
            with suppress(Exception):
                others = self._reported_exits()
        if self._stopped.wait(GRACE):
            return
        with suppress(Exception):
            others = self._reported_exits()
        # Where none is the cause, they follow from what hangs here, which their errors name.
        self.remote_cause = _first_cause(others) or next(iter(others.values()))
        terminate()

    def stop(self) -> None:
        """End the thread: the nodes have met anew."""
        self._stopped.set()

    def exchange(self, own: ProcessExit) -> ProcessExit:
        """Report this node's failure to the others; return the cause, which may be theirs.

        Waits for the other nodes' reports unless this node's failure is the cause.
        """
        self._stopped.set()
        cause, began = own, time.monotonic()
        self._deadline = began + _TIMEOUT
        self._has_failed = True
        try:
            self._exits.submit(asdict(own))
            while not cause.is_cause and time.monotonic() < self._deadline:
                time.sleep(_PAUSE)
                has_all = not self._exits.missing()
                cause = _first_cause(self._reported_exits()) or own
                if has_all:
                    break
                if self._has_lost_node():  # it reports nothing
                    self._deadline = min(self._deadline, began + _OTHERS_SECONDS)
        except ExchangeError:
            self._is_lost = True
        return cause

    def leave(self) -> None:
        """On node 0, which hosts the store: wait until the others have left, for a while."""
        self._stopped.set()
        if self._is_lost:
            return
        with suppress(ExchangeError):
            if not self._has_failed:
                self._exits.submit()
            self._ends.submit()
            if self._node == 0:
                # Who has not reported by the deadline of `exchange` is gone.
                seconds = self._deadline - time.monotonic() if self._deadline else _TIMEOUT
                self._ends.wait(seconds)

    def _reported_exits(self) -> dict[int, ProcessExit]:
        """The failures that other nodes have reported so far, the first of them first."""
        reported = self._exits.submitted().items()
        return {
            node: ProcessExit.from_record(said)
            for node, said in reported
            if said and node != self._node
        }


def _first_cause(exits: Mapping[int, ProcessExit]) -> ProcessExit | None:
    return next((process for process in exits.values() if process.is_cause), None)
