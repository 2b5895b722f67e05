"""Which node keeps a copy of another node's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def partners(vendors_by_node: Sequence[str]) -> list[int]:
    """The node that keeps a copy of each node's state; empty for fewer than two nodes.

    It is one of another vendor where there is one, so that the loss of a vendor loses no state, and
    else the next node. No node keeps its own, and the nodes of a vendor keep as many copies each,
    or one more.
    """
    nodes = len(vendors_by_node)
    if nodes < 2:
        return []
    counts = Counter(vendors_by_node)
    if len(counts) == 1:
        return [(node + 1) % nodes for node in range(nodes)]
    found, loads = [0] * nodes, [0] * nodes
    # The largest vendor has the fewest nodes to choose from, so it chooses first.
    for node in sorted(range(nodes), key=lambda node: (-counts[vendors_by_node[node]], node)):
        others = [n for n in range(nodes) if vendors_by_node[n] != vendors_by_node[node]]
        lightest = min(others, key=lambda other: (loads[other], other))
        found[node] = lightest
        loads[lightest] += 1
    return found
