"""Calls between nodes, here between two parts of one process over loopback."""

from __future__ import annotations

import itertools
import socket
import time

import pytest
from torch.distributed import HashStore

from hetero.errors import UserError
from hetero.tools.preflight_checks import reach
from hetero.tools.preflight_checks.reach import Call, NicListeners, call_all

LOOPBACK = {"lo": "127.0.0.1"}


def called(nics: dict[str, str] = LOOPBACK, *, secret: str = "secret", **how: float) -> list[Call]:
    """Calls of node 0 to node 3, which listens on these NICs."""
    store = HashStore()
    with NicListeners(store, nics, "secret") as listeners:
        others = {3: listeners.ports}
        return call_all(store, secret, source=0, addresses=LOOPBACK, others=others, **how)


def test_a_node_that_listens_is_reached_and_tells_the_time():
    (call,) = called()
    assert (call.source, call.target, call.error) == (0, 3, "")
    assert (call.source_nic, call.target_nic) == ("lo", "lo")
    assert abs(call.clock_difference) <= call.clock_uncertainty + 0.05


def test_a_clock_that_is_ahead_is_seen_to_be(monkeypatch):
    # The caller reads its clock before the listener does, in turns.
    real, ahead = time.time, itertools.cycle([0.0, 100.0])
    monkeypatch.setattr(reach.time, "time", lambda: real() + next(ahead))
    (call,) = called()
    assert call.clock_difference == pytest.approx(100.0, abs=1.0)


def test_a_closed_port_is_reported_with_its_address():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (call,) = call_all(
        HashStore(),
        "secret",
        source=0,
        addresses=LOOPBACK,
        others={1: {"eth5": ("127.0.0.1", port)}},
        seconds=0.3,
    )
    assert f"127.0.0.1:{port} from 127.0.0.1" in call.error
    assert "refused" in call.error
    assert call.clock_difference is None


def test_a_stranger_is_not_answered():
    (call,) = called(secret="another", seconds=0.5)
    assert call.error
    assert call.clock_difference is None


def test_the_side_with_fewer_nics_uses_them_in_turn():
    calls = called({"lo": "127.0.0.1", "lo2": "127.0.0.2"})
    assert [(c.source_nic, c.target_nic, c.error) for c in calls] == [
        ("lo", "lo", ""),
        ("lo", "lo2", ""),
    ]


def test_only_addresses_of_this_node_are_listened_on_and_none_once_it_is_closed():
    with pytest.raises(UserError, match=r"on eth9 \(203\.0\.113\.7: .*; name other NICs"):
        NicListeners(HashStore(), {**LOOPBACK, "eth9": "203.0.113.7"}, "secret")
    with NicListeners(HashStore(), LOOPBACK, "secret") as listeners:
        address = listeners.ports["lo"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=1.0)
