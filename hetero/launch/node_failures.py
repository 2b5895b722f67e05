"""Why a node's processes ended, told to the launchers of the other nodes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousInfo

from hetero.launch.exits import ProcessExit
from hetero.store import BoundedStore

_PAUSE = 0.2
GRACE = 15.0
"""Seconds for processes to end of themselves after those of another node."""
_PATIENCE = GRACE + 5.0
"""Seconds for the other nodes to notice what this one has, whose processes may go on so long."""


class NodeFailures:
    """One launcher's side, over the store of its rendezvous.

    Everything here is an extra for a person who reads: whatever fails, fails silently.
    """

    def __init__(self, info: RendezvousInfo, *, grace: float) -> None:
        # On node 0 it hosts the others' store, until nobody holds it.
        self._hosting = info.store
        # A connection of its own: torchelastic may wait for minutes on the other.
        store = PrefixStore("hetero/node failures", info.store).clone()  # type: ignore[attr-defined]
        self._store = BoundedStore(store, seconds=_PATIENCE)
        self._node, self._nodes = info.rank, info.world_size
        self._grace = grace
        self._over = threading.Event()
        self.ended_for: ProcessExit | None = None
        """The other node's process for whose end this node's were ended."""

    def watch(self, end: Callable[[], None]) -> None:
        """Call `end` if a process of another node is the cause of an end, and ours go on."""
        threading.Thread(target=self._watch, args=(end,), name="node failures", daemon=True).start()

    def _watch(self, end: Callable[[], None]) -> None:
        while not self._over.wait(_PAUSE):
            cause = self._cause_elsewhere()
            if cause is not None:
                if not self._over.wait(self._grace):
                    self.ended_for = cause
                    end()
                return

    def exchange(self, own: ProcessExit) -> ProcessExit:
        """Tell the others; return the cause, which may lie with them."""
        self._over.set()
        with suppress(Exception):
            self._store.set(f"exit/{self._node}", json.dumps(asdict(own)))
        cause, deadline = own, time.monotonic() + _PATIENCE
        while not cause.is_cause and time.monotonic() < deadline:
            time.sleep(_PAUSE)
            cause = self._cause_elsewhere() or own
        return cause

    def leave(self) -> None:
        """Node 0's launcher hosts the store: it stays until the others have read, for a while."""
        self._over.set()
        with suppress(Exception):
            self._store.set(f"left/{self._node}", "1")
            others = [f"left/{node}" for node in range(self._nodes) if node != self._node]
            deadline = time.monotonic() + _PATIENCE
            while self._node == 0 and others and time.monotonic() < deadline:
                others = [key for key in others if not self._store.check([key])]
                time.sleep(_PAUSE if others else 0)

    def _cause_elsewhere(self) -> ProcessExit | None:
        with suppress(Exception):
            for node in range(self._nodes):
                key = f"exit/{node}"
                if node != self._node and self._store.check([key]):
                    process = ProcessExit(**json.loads(self._store.get(key)))
                    if process.is_cause:
                        return process
        return None
