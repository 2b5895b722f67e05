"""Assignment of a plan's ranks to nodes: one vendor per node, filled in rank order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetero.plan.plan import Plan


@dataclass(frozen=True)
class Node:
    vendor: str
    ranks: range
    gpus: int
    """GPUs of the node, of which not all need be used."""


def nodes_of(plan: Plan, gpus_per_node: Mapping[str, int]) -> list[Node]:
    """The nodes in rank order. A new node starts where one is full or the vendor changes.

    Consecutive meshes of one vendor may share a node.
    """
    found: list[Node] = []
    rank = 0
    for mesh in plan.meshes:
        end, gpus = rank + mesh.world_size, gpus_per_node[mesh.vendor]
        while rank < end:
            last = found[-1] if found else None
            if last is None or last.vendor != mesh.vendor or len(last.ranks) == gpus:
                last = Node(mesh.vendor, range(rank, rank), gpus)
                found.append(last)
            stop = min(end, last.ranks.start + gpus)
            found[-1] = replace(last, ranks=range(last.ranks.start, stop))
            rank = stop
    return found
