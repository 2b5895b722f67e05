"""Exchanges between the launchers of a job's nodes why a node's processes failed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousInfo

from hetero.launch.exits import ProcessExit
from hetero.startup.store import BoundedStore

_PAUSE = 0.2
GRACE = 15.0
"""Seconds for this node's processes to end by themselves after those of another node failed."""
_TIMEOUT = GRACE + 5.0
"""Seconds for the launchers of the other nodes to notice a failure, after their own grace."""
_EXITS = "exits"
"""A line for each node that has failed: the one key that every launcher polls meanwhile."""
_CALL_SECONDS = 5.0
"""For the store to answer; after that this node does without it."""


class NodeFailures:
    """One launcher's side, over the store of its rendezvous.

    It only makes the last line more helpful, so its own errors are ignored.
    """

    def __init__(self, info: RendezvousInfo) -> None:
        # Keep a reference: on node 0 this object hosts the store of all nodes.
        self._hosting = info.store
        # A connection of its own: torchelastic may block the other for minutes.
        store = PrefixStore("hetero/node failures", info.store).clone()  # type: ignore[attr-defined]
        self._store = BoundedStore(store, seconds=_CALL_SECONDS)
        self._node = info.rank
        self._others = [node for node in range(info.world_size) if node != info.rank]
        self._stopped = threading.Event()
        self._deadline: float | None = None
        self._is_lost = False
        """Whether the store does not answer any more."""
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

    def exchange(self, own: ProcessExit) -> ProcessExit:
        """Report this node's failure to the others; return the cause, which may be theirs.

        Waits for the other nodes' reports unless this node's failure is the cause.
        """
        self._stopped.set()
        cause, self._deadline = own, time.monotonic() + _TIMEOUT
        try:
            self._store.append(_EXITS, f"{json.dumps([self._node, asdict(own)])}\n")
            while not cause.is_cause and time.monotonic() < self._deadline:
                time.sleep(_PAUSE)
                others = self._reported_exits()
                cause = _first_cause(others) or own
                silent = [node for node in self._others if node not in others]
                if all(self._store.check([f"left/{node}"]) for node in silent):
                    break
        except Exception:
            self._is_lost = True
        return cause

    def leave(self) -> None:
        """On node 0, which hosts the store: wait until the others have left, for a while."""
        self._stopped.set()
        if self._is_lost:
            return
        with suppress(Exception):
            self._store.set(f"left/{self._node}", "1")
            if self._node == 0:
                # Who has not reported by the deadline of `exchange` is gone.
                seconds = self._deadline - time.monotonic() if self._deadline else _TIMEOUT
                keys = [f"left/{node}" for node in self._others]
                self._store.wait(keys, timedelta(seconds=seconds))

    def _reported_exits(self) -> dict[int, ProcessExit]:
        """What nodes have reported so far, by node."""
        if not self._store.check([_EXITS]):
            return {}
        reported = map(json.loads, self._store.get(_EXITS).splitlines())
        return {node: ProcessExit(**said) for node, said in reported}


def _first_cause(exits: Mapping[int, ProcessExit]) -> ProcessExit | None:
    return next((process for process in exits.values() if process.is_cause), None)
