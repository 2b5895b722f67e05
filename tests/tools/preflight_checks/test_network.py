"""What passes between nodes: calls, clocks and links. Contents and reports, never speed."""

from __future__ import annotations

import itertools
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from hetero.errors import UserError
from hetero.tools.preflight_checks import network
from hetero.tools.preflight_checks.network import (
    Call,
    End,
    NicListeners,
    PathResult,
    call_all,
    measure_paths,
    rails_between,
)
from tests.tools.preflight_checks.test_checks import call

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
    monkeypatch.setattr(network.time, "time", lambda: real() + next(ahead))
    (call,) = called()
    assert call.clock_difference == pytest.approx(100.0, abs=1.0)


def test_a_closed_port_is_reported_with_its_address():
    with socket.socket() as silent:  # it has the port, and does not listen
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
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


FIGURES = "latency_us", "there_gb_s", "back_gb_s", "both_gb_s"


def ends() -> list[list[PathResult]]:
    """Both ends in threads of this process."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))
    addresses = ("127.0.0.1", "127.0.0.2")

    def measured(number: int) -> list[PathResult]:
        device = torch.device("cpu")
        end = End(number=number, store=store, secret="secret", addresses=addresses, device=device)
        return measure_paths(end)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(measured, range(2), timeout=100))


def test_auto_every_rail_and_all_rails_together_are_measured():
    first, second = ends()
    labels = [result.path for result in first]
    assert labels == [result.path for result in second]
    assert labels[0].startswith("auto: ")
    assert labels[-3:] == ["tcp 1", "tcp 2", "tcp"]
    for result in first:
        assert result.error == ""
        assert min(vars(result)[figure] for figure in FIGURES) > 0
        rail = result.rail_figures(rails=2)
        one_way = 4 * min(result.there_gb_s, result.back_gb_s)
        assert rail["rail_both_ways_gbits"] <= rail["rail_gbits"] == one_way


def test_only_rails_that_answer_both_ways_are_rails():
    rail = {"source_nic": "eth1", "target_nic": "eth1"}
    calls = [call(0, 1), call(1, 0), call(0, 1, **rail), call(1, 0, **rail, error="timed out")]
    assert rails_between(calls, 0, 1) == [("eth0", "eth0")]
