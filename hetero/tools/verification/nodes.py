"""How the nodes of `hetero verify` speak with each other: one process a node, over one store."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hetero.errors import HeteroError, UserError
from hetero.startup.exchange import WaitReporter, await_listener
from hetero.startup.store import BoundedStore

PATIENCE = 600.0
"""Seconds for all nodes to have come."""
_END_SECONDS = 15.0
_SLICE = 1 << 20
"""Characters of a file in one value of the store, which takes few megabytes."""


class NodeLost(HeteroError):
    """A node has ended, hangs or cannot be reached: no further step can be run."""


class OtherNodeFailed(HeteroError):
    """The step has failed on another node, which says why at the step's end."""


class Nodes:
    """One node's end. Every node makes the same exchanges in the same order."""

    def __init__(self, *, number: int, count: int, master: str, port: int) -> None:
        """Waits for node 0, and not yet for others. Raises UserError."""
        self.number, self.count = number, count
        self.master, self.port = master, port
        self._said = 0
        self._told: set[str] = set()
        self._store: BoundedStore | None = None
        if count == 1:
            return
        if number > 0:
            self._await_first_node()
        try:
            store = dist.TCPStore(
                master,
                port,
                None,
                number == 0,
                timedelta(seconds=PATIENCE),
                wait_for_workers=False,
            )
        except Exception as error:
            remedy = "another program uses the port: choose another --master-port"
            reason = remedy if number == 0 else "see that it can be reached from here"
            raise UserError(f"node {number} could not open {master}:{port}; {reason}") from error
        self._store = BoundedStore(dist.PrefixStore("hetero verify", store))
        found = self._store.compare_set("nodes", "", str(count)).decode()
        if found != str(count):
            raise UserError(
                f"node 0 was started with --nnodes {found} and node {number} with {count}; start "
                "every node with the same"
            )
        if self._store.add(f"node {number}", 1) > 1:
            raise UserError(
                f"two nodes say that they are --node-rank {number}; give each its own, and each "
                "job its own --master-port"
            )

    def _await_first_node(self) -> None:
        def who(error: OSError) -> str:
            return f"node 0 at {self.master}:{self.port} ({error.strerror or error})"

        try:
            await_listener(self.master, self.port, seconds=PATIENCE, who=who)
        except OSError as error:
            raise UserError(
                f"nobody listens at {self.master}:{self.port} ({error.strerror or error}); start "
                "the same command with --node-rank 0 there, and see that it can be reached"
            ) from error

    def exchange(
        self,
        payload: Mapping[str, Any],
        *,
        seconds: float,
        check_abort: Callable[[], None] = lambda: None,
    ) -> list[dict[str, Any]]:
        """What every node says, by its number. Raises NodeLost, naming those that say nothing."""
        self._said += 1
        if self._store is None:
            return [json.loads(json.dumps(payload))]
        keys = [f"{self._said}/{node}" for node in range(self.count)]
        waiting = WaitReporter()

        def look() -> None:
            check_abort()
            silent = self._silent(keys)
            waiting.report(lambda: f"node {', '.join(map(str, silent))}")
            if left := [node for node in silent if self._has_left(node)]:
                raise NodeLost(
                    f"node {', '.join(map(str, left))} has left before the end; see what "
                    "`hetero verify` printed there, and start it again on every node"
                )

        try:
            self._store.set(keys[self.number], json.dumps(payload))
            self._store.wait(keys, timedelta(seconds=seconds), check_abort=look)
            return [json.loads(self._store.get(key)) for key in keys]
        except HeteroError:
            raise
        except Exception as error:
            raise NodeLost(self._lost(keys, seconds, error)) from error

    def _silent(self, keys: Sequence[str]) -> list[int]:
        assert self._store is not None
        return [node for node, key in enumerate(keys) if not self._store.check([key])]

    def _has_left(self, node: int) -> bool:
        return self._store is not None and bool(self._store.check([f"left/{node}"]))

    def _lost(self, keys: list[str], seconds: float, error: Exception) -> str:
        assert self._store is not None
        with suppress(Exception):
            if silent := self._silent(keys):
                names = ", ".join(map(str, silent))
                return (
                    f"node {names} has said nothing for {seconds:.0f} s; see "
                    "whether `hetero verify` still runs there, and what it printed last"
                )
        return (
            f"the store on node 0 is lost ({str(error).partition(chr(10))[0]}); see whether "
            "`hetero verify` still runs there, and the network between"
        )

    def tell(self, what: str) -> None:
        """Say a word that nodes look for with `is_told`."""
        self._told.add(what)
        if self._store is not None:
            self._store.set(f"told/{what}", "1")

    def is_told(self, what: str) -> bool:
        if what in self._told:
            return True
        return self._store is not None and bool(self._store.check([f"told/{what}"]))

    def send_file(self, name: str, content: bytes) -> None:
        """Give a file of some megabytes to the other nodes."""
        if self._store is None:
            return
        text = base64.b64encode(content).decode()
        slices = [text[at : at + _SLICE] for at in range(0, len(text), _SLICE)]
        for number, piece in enumerate(slices):
            self._store.set(f"file/{name}/{number}", piece)
        self._store.set(f"file/{name}", str(len(slices)))

    def fetch_file(self, name: str) -> bytes:
        """A file that another node has sent."""
        assert self._store is not None
        count = int(self._store.get(f"file/{name}"))
        slices = [self._store.get(f"file/{name}/{number}").decode() for number in range(count)]
        return base64.b64decode("".join(slices))

    def leave(self) -> None:
        """Node 0 hosts the store, and so leaves last. Raises nothing: all is known by now."""
        if self._store is None:
            return
        with suppress(Exception):
            self._store.set(f"left/{self.number}", "1")
            if self.number == 0:
                left = [f"left/{node}" for node in range(self.count)]
                self._store.wait(left, timedelta(seconds=_END_SECONDS))
