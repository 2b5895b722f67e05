"""Who speaks for a node, and who measures with whom."""

from __future__ import annotations

import itertools

import pytest

from hetero.tools.preflight_checks.job import Place, rounds


def test_nodes_are_numbered_by_their_first_rank():
    identities = ["b", "b", "a", "a", "b"]
    places = [Place.find(identities, rank) for rank in range(5)]
    assert [(p.node, p.local_rank) for p in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]
    assert places[0].sizes == (3, 2)


@pytest.mark.parametrize("nodes", [1, *range(2, 9), 9, 16, 17])
def test_every_pair_of_few_nodes_and_neighbours_among_many_measure_once(nodes):
    found = rounds(nodes)
    for pairs in found:
        busy = list(itertools.chain.from_iterable(pairs))
        assert len(busy) == len(set(busy)), "no node twice in a round"
    measured = sorted(tuple(sorted(pair)) for pair in itertools.chain.from_iterable(found))
    if nodes < 9:
        assert measured == list(itertools.combinations(range(nodes), 2))
    else:
        assert len(found) <= 3
        ring = {tuple(sorted((node, (node + 1) % nodes))) for node in range(nodes)}
        assert measured == sorted(ring)
