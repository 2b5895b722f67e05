"""Which process speaks for which node, and which nodes measure together, and over what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.tools.preflight_checks.cluster_advice import NodeCard
from hetero.tools.preflight_checks.reach import Call

_EVERY_PAIR_UP_TO = 8
"""Nodes; among more, only neighbours measure their bandwidth."""


@dataclass(frozen=True)
class Place:
    """Where this process stands among the nodes."""

    node: int
    """The number of its node."""
    local_rank: int
    """Its place among the node's processes; 0 speaks for the node."""
    sizes: tuple[int, ...]
    """Processes of each node."""

    @classmethod
    def find(cls, identities: Sequence[str], rank: int) -> Place:
        """From what every rank calls its node; nodes are numbered by their first rank."""
        nodes = list(dict.fromkeys(identities))
        local_rank = identities[:rank].count(identities[rank])
        sizes = tuple(identities.count(node) for node in nodes)
        return cls(nodes.index(identities[rank]), local_rank, sizes)


def reached_rails(
    pair: tuple[int, int], cards: Sequence[NodeCard], calls: Sequence[Call]
) -> list[tuple[str, str]]:
    """The addresses of both ends of every rail between two nodes that works both ways."""

    def reached(source: int, target: int) -> set[tuple[str, str]]:
        return {
            (call.source_nic, call.target_nic)
            for call in calls
            if (call.source, call.target) == (source, target) and call.works
        }

    there, back = reached(*pair), reached(pair[1], pair[0])
    return [
        (cards[0].addresses[ours], cards[1].addresses[theirs])
        for ours, theirs in sorted(there)
        if (theirs, ours) in back
    ]


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Which pairs of nodes measure at once: every pair in some round, no node twice in one.

    Among many nodes only neighbours, the last and the first included.
    """
    if nodes < 2:
        return []
    if nodes > _EVERY_PAIR_UP_TO:
        ring = [(node, (node + 1) % nodes) for node in range(nodes)]
        last = [ring[-1]] if nodes % 2 else []
        even = ring[0 : nodes - nodes % 2 : 2]
        return [even, ring[1::2], *([last] if last else [])]
    seats: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        couples = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append(
            [(min(a, b), max(a, b)) for a, b in couples if a is not None and b is not None]
        )
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found
