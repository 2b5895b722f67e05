"""How the nodes of `hetero verify` speak with each other: one process a node, over one store."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hetero.errors import ExchangeError, HeteroError, UserError
from hetero.startup.exchange import Exchange
from hetero.startup.store import BoundedStore, WaitReporter, await_listener
from hetero.text import spans

PATIENCE = 600.0
"""Seconds for all nodes to have come."""
_END_SECONDS = 15.0
_SLICE = 1 << 20
"""Characters of a file in one value of the store, which takes few megabytes."""


class Nodes:
    """One node's end. Every node makes the same exchanges in the same order within each step."""

    def __init__(self, *, number: int, count: int, master: str, port: int) -> None:
        """Waits for node 0, and not yet for others. Raises UserError."""
        self.number, self.count = number, count
        self.master, self.port = master, port
        self._step, self._exchanges = 0, 0
        """Which step runs, and how many exchanges it has had on this node."""
        store: dist.Store = dist.HashStore()
        if count > 1:
            store = dist.PrefixStore("hetero verify", self._open_store())
        self._store = BoundedStore(store)
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

    def _open_store(self) -> dist.Store:
        """The store that node 0 hosts."""

        def who(error: OSError) -> str:
            return f"node 0 at {self.master}:{self.port} ({error.strerror or error})"

        try:
            if self.number > 0:
                await_listener(self.master, self.port, seconds=PATIENCE, who=who)
        except OSError as error:
            raise UserError(
                f"nobody listens at {self.master}:{self.port} ({error.strerror or error}); start "
                "the same command with --node-rank 0 there, and see that it can be reached"
            ) from error
        try:
            return dist.TCPStore(
                self.master,
                self.port,
                None,
                self.number == 0,
                timedelta(seconds=PATIENCE),
                wait_for_workers=False,
            )
        except Exception as error:
            remedy = "another program uses the port: choose another --master-port"
            reason = remedy if self.number == 0 else "see that it can be reached from here"
            raise UserError(
                f"node {self.number} could not open {self.master}:{self.port}; {reason}"
            ) from error

    def begin_step(self) -> None:
        """Every node begins the same steps in the same order."""
        self._step, self._exchanges = self._step + 1, 0

    def exchange(
        self, payload: Mapping[str, Any], *, seconds: float, ends_step: bool = False
    ) -> list[dict[str, Any]]:
        """What every node submits, by its number. Raises ExchangeError.

        A step's last exchange, `ends_step`, is also reached by a node on which the step failed.
        """
        if not ends_step:
            self._exchanges += 1
        exchange = self._exchange(self._step, None if ends_step else self._exchanges)
        waiting = WaitReporter()
        return exchange.run(
            payload,
            timeout=seconds,
            check=lambda: waiting.report(lambda: spans(exchange.missing(), "node")),
        )

    def fail_step(self) -> None:
        """Have the other nodes not wait for this one until the step's last exchange."""
        self._abort("another node has given this step up; it says why", self._open_numbers())

    def leave(self) -> None:
        """End what others may still wait for. Node 0 hosts the store, and so leaves last.

        Raises nothing: all is known by now.
        """
        text = (
            f"node {self.number} has left before the end; see what `hetero verify` printed there, "
            "and start it again on every node"
        )
        following = [(self._step, None), (self._step + 1, 1), (self._step + 1, None)]
        with suppress(ExchangeError):
            self._abort(text, [*self._open_numbers(), *following])
            left = self._named("ends")
            left.submit()
            if self.number == 0:
                left.wait(_END_SECONDS)

    def tell(self, what: str) -> None:
        """Tell the other nodes something that they look for with `is_told`. One node does, once."""
        self._named(what).submit()

    def is_told(self, what: str) -> bool:
        return self._named(what).has_begun()

    def send_file(self, name: str, content: bytes) -> None:
        """Give a file of some megabytes to the other nodes."""
        text = base64.b64encode(content).decode()
        slices = [text[at : at + _SLICE] for at in range(0, len(text), _SLICE)]
        for number, piece in enumerate(slices):
            self._store.set(f"file/{name}/{number}", piece)
        self._store.set(f"file/{name}", str(len(slices)))

    def fetch_file(self, name: str) -> bytes:
        """A file that another node has sent."""
        count = int(self._store.get(f"file/{name}"))
        slices = [self._store.get(f"file/{name}/{number}").decode() for number in range(count)]
        return base64.b64decode("".join(slices))

    def _open_numbers(self) -> list[tuple[int, int | None]]:
        """The step's exchanges in which other nodes may wait for this one."""
        return [(self._step, self._exchanges), (self._step, self._exchanges + 1)]

    def _abort(self, text: str, numbers: Iterable[tuple[int, int | None]]) -> None:
        for step, number in numbers:
            self._exchange(step, number).abort(HeteroError(text))

    def _exchange(self, step: int, number: int | None) -> Exchange:
        """One of a step's exchanges; its last one is without a number."""
        return self._named(
            f"results of step {step}", key=f"{step}/{'end' if number is None else number}"
        )

    def _named(self, what: str, key: str = "") -> Exchange:
        return Exchange(
            self._store,
            what,
            member=self.number,
            size=self.count,
            key=key,
            name_members=lambda nodes: spans(nodes, "node"),
            remedy="see whether `hetero verify` still runs there, and what it printed last",
        )
