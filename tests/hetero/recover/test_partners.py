"""Every node's state has a copy elsewhere, at another vendor where there is one."""

from __future__ import annotations

from collections import Counter
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from hetero.recover.partners import partners

VENDORS = st.lists(st.sampled_from(["nvidia", "amd", "cpu"]), min_size=2, max_size=24)


@given(VENDORS)
def test_no_node_keeps_its_own_state_and_each_has_one_partner(vendors: list[str]) -> None:
    found = partners(vendors)
    assert len(found) == len(vendors)
    assert all(0 <= partner < len(vendors) for partner in found)
    assert all(partner != node for node, partner in enumerate(found))


@given(VENDORS)
def test_the_partner_is_of_another_vendor_where_there_is_one(vendors: list[str]) -> None:
    if len(set(vendors)) > 1:
        assert all(vendors[p] != vendors[node] for node, p in enumerate(partners(vendors)))


@given(VENDORS)
def test_the_nodes_of_a_vendor_keep_as_many_copies_each_or_one_more(vendors: list[str]) -> None:
    loads = Counter(partners(vendors))
    for vendor in set(vendors):
        of_vendor = [loads[node] for node, name in enumerate(vendors) if name == vendor]
        assert max(of_vendor) - min(of_vendor) <= 1


@given(st.integers(1, 12), st.integers(1, 12))
def test_of_two_vendors_none_keeps_more_than_its_share(nvidia: int, amd: int) -> None:
    loads = Counter(partners(["nvidia"] * nvidia + ["amd"] * amd))
    assert max(loads[node] for node in range(nvidia)) == ceil(amd / nvidia)
    assert max(loads[nvidia + node] for node in range(amd)) == ceil(nvidia / amd)


def test_a_node_alone_has_none() -> None:
    assert partners(["amd"]) == []
    assert partners(["amd", "amd", "amd"]) == [1, 2, 0]
    assert partners(["nvidia", "amd", "nvidia", "amd"]) == [1, 0, 3, 2]
