"""By which address the ranks of other hosts reach a rank."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from hetero.startup import addresses
from hetero.startup.addresses import (
    address_leading_to,
    address_towards,
    interface_address,
    interface_with,
    lead_gloo_towards,
    reachable_address,
)

INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "enp1": ["10.0.0.1", "fe80::1%enp1", "fd00::1"],
    "enp2": ["fe80::2%enp2", "fd01::1"],
    "enp3": ["fe80::3%enp3"],
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(address: str) -> SimpleNamespace:
        return SimpleNamespace(family=addresses.family_of(address), address=address)

    table = {name: [entry(a) for a in found] for name, found in INTERFACES.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: table)


def test_only_a_rank_that_shares_the_hosts_with_what_all_reach_needs_another_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its host may resolve the name of what all reach, as MASTER_ADDR, to a loopback address."""
    monkeypatch.setattr(addresses, "address_towards", {"10.0.0.2": "10.0.0.1"}.get)
    several = ["127.0.0.1", "10.0.0.2"]
    assert [reachable_address(own, several) for own in several] == ["10.0.0.1", "10.0.0.2"]
    assert reachable_address("127.0.0.1", ["127.0.0.1"] * 2) == "127.0.0.1"


def test_an_address_has_its_interface() -> None:
    assert interface_with("10.0.0.1") == "enp1"
    assert interface_with("fd01::1") == "enp2"
    assert interface_with("127.0.1.1") == "lo"
    assert interface_with("10.0.0.9") is None


def test_an_interface_has_an_address_of_the_family_that_is_asked_for() -> None:
    assert interface_address("enp1") == "10.0.0.1"
    assert interface_address("enp1", socket.AF_INET6) == "fd00::1"
    assert interface_address("enp2") == "fd01::1"
    assert interface_address("enp2", socket.AF_INET) is None
    assert interface_address("enp3") is None
    assert interface_address("no such interface") is None


@pytest.mark.parametrize("here", ["127.0.0.1", "localhost"])
def test_the_way_to_this_host_stays_within_it(here: str) -> None:
    assert address_towards(here) in ("127.0.0.1", "::1")
    assert address_leading_to(here) is None


def test_there_is_no_way_to_a_host_without_an_address() -> None:
    assert address_leading_to("no.such.host.invalid") is None


@pytest.mark.parametrize(
    ("own", "named", "expected"),
    [
        pytest.param("10.0.0.1", None, "enp1", id="another host"),
        pytest.param("10.0.0.1", "enp9", "enp9", id="named by the user"),
        pytest.param("127.0.0.1", None, None, id="this host"),
    ],
)
def test_gloo_takes_the_interface_that_leads_to_rank_0(
    monkeypatch: pytest.MonkeyPatch, own: str, named: str | None, expected: str | None
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named or "")
    if named is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(addresses, "address_towards", {"rank0.example": own}.get)
    lead_gloo_towards("rank0.example")
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected


def test_an_ipv4_address_in_the_words_of_ipv6_leads_over_ipv4() -> None:
    """As MASTER_ADDR may have it. At the address in those words none could listen."""
    assert address_towards("::ffff:127.0.0.1") == "127.0.0.1"
