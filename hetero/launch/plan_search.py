"""Searches fallback plans in threads, so that the coordinator keeps watching signs of life."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from hetero.errors import UserError
from hetero.launch.fallback import AUTO_FLAG, ChosenPlan, Node, NodeT
from hetero.startup.store import in_thread
from hetero.text import counted, size_text

_SEARCH_SECONDS = 60.0


@dataclass(frozen=True, order=True)
class Kind:
    """Nodes that the planner takes as equal."""

    vendor: str
    accelerator: str
    processes: int

    @classmethod
    def of(cls, node: Node) -> Kind:
        return cls(node.vendor, node.accelerator, node.processes)

    @property
    def name(self) -> str:
        device = f" {self.accelerator}" if self.accelerator else ""
        return f"{self.vendor}{device} with {counted(self.processes, 'rank')}"


@dataclass(frozen=True)
class Supply:
    """How many nodes of a kind there are."""

    kind: Kind
    nodes: int
    memory: int
    """Bytes for each process, on the node that has least."""


@dataclass(frozen=True)
class Layout:
    """A plan that the planner has found."""

    name: str
    text: str
    """Of a plan file."""
    parts: tuple[tuple[Kind, int], ...]
    """The number of nodes of each mesh, in order."""

    def on(self, nodes: Iterable[NodeT]) -> ChosenPlan[NodeT]:
        """The plan on these nodes, of which there must be enough, in their order."""
        left, chosen = list(nodes), list[NodeT]()
        for kind, count in self.parts:
            mine = [node for node in left if Kind.of(node) == kind][:count]
            chosen += mine
            left = [node for node in left if not any(node is one for one in mine)]
        return ChosenPlan(self.name, self.text, tuple(chosen))


class Planner(Protocol):
    """Finds plans. Threads: any."""

    def plan(self, supplies: Sequence[Supply]) -> Layout:
        """Raises UserError where none fits."""

    def assumption(self, supplies: Sequence[Supply]) -> str:
        """What its costs are taken from, for the log."""


class PlanSearch:
    """Searches in threads, and remembers what was found. For one thread, which never waits."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._begun: dict[tuple[Supply, ...], tuple[Future[Layout], float]] = {}

    def outcome(self, nodes: Iterable[Node]) -> Layout | UserError | None:
        """The plan for these nodes, or the error if none fits; None while the search runs."""
        supplies = supplies_of(nodes)
        if supplies not in self._begun:
            searching = in_thread(lambda: self._planner.plan(supplies))
            self._begun[supplies] = searching, time.monotonic()
        future, began = self._begun[supplies]
        if future.done():
            failure = future.exception()
            if failure is None:
                return future.result()
            if isinstance(failure, UserError):
                return failure
            return UserError(f"{AUTO_FLAG}: the planner failed ({failure!r}); give a plan file")
        if time.monotonic() - began < _SEARCH_SECONDS:
            return None
        return UserError(
            f"{AUTO_FLAG}: the search for a plan took more than {_SEARCH_SECONDS:g} s on "
            f"{supplies_text(supplies)}; give a plan file"
        )

    def assumption(self, nodes: Iterable[Node]) -> str:
        return self._planner.assumption(supplies_of(nodes))


def supplies_of(nodes: Iterable[Node]) -> tuple[Supply, ...]:
    """The nodes by kind, in an order that does not depend on theirs."""
    by_kind: dict[Kind, list[Node]] = {}
    for node in nodes:
        by_kind.setdefault(Kind.of(node), []).append(node)
    return tuple(
        Supply(kind, len(equal), min(node.memory for node in equal))
        for kind, equal in sorted(by_kind.items())
    )


def supplies_text(supplies: Iterable[Supply]) -> str:
    return " and ".join(
        f"{counted(supply.nodes, 'node')} of {supply.kind.name} of {size_text(supply.memory)} each"
        for supply in supplies
    )
