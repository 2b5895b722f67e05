"""Where the connections of a TCP link run, and what is asked of the kernel for them."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from hetero.link.tcp import _reachable, open_connections, tune
from tests.hetero.link.test_handshake import both, rendezvous


def opened(*addresses: Sequence[str], rails: int = 4, timeout: float = 5.0) -> list[Any]:
    """Each end's connections, which the caller of this closes with the stacks they are on."""
    store = dist.HashStore()
    stacks = [ExitStack(), ExitStack()]
    ends = both(
        *(
            lambda rank=rank: open_connections(
                rendezvous(rank, store, timeout=timeout),
                addresses[rank],
                rails=rails,
                stack=stacks[rank],
            )
            for rank in range(2)
        )
    )
    return [*ends, *stacks]


def test_connections_are_spread_over_the_addresses_with_two_paths_to_talk_over() -> None:
    addresses = ["127.0.0.1", "127.0.0.2"], ["127.0.0.3", "127.0.0.4"]
    *ends, one, other = opened(*addresses, rails=4)
    with one, other:
        for end, own in zip(ends, addresses, strict=True):
            assert [c.getsockname()[0] for c in end.rails] == own * 2
            assert [c.getsockname()[0] for c in end.control] == own
        for kind in ("rails", "control"):
            here, there = (getattr(end, kind) for end in ends)
            assert [c.getpeername() for c in here] == [c.getsockname() for c in there]


def test_each_address_has_a_connection_at_least() -> None:
    addresses = ["127.0.0.1", "127.0.0.2"]
    *ends, one, other = opened(addresses, addresses, rails=1)
    with one, other:
        assert [len(end.rails) for end in ends] == [2, 2]


@pytest.mark.parametrize("within_host", [True, False])
def test_buffers_are_small_within_a_host_and_the_kernels_own_between_hosts(
    within_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = "127.0.0.1" if within_host else "192.0.2.1"
    entry = SimpleNamespace(family=socket.AF_INET, address=ours)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"emulated": [entry]})
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connection,
    ):
        tune(connection)
        size = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        patience = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    # The kernel doubles what it is asked for, to have room for its own needs.
    assert (size == 2 * (256 << 10)) == within_host
    assert patience == 0


def test_an_address_that_does_not_answer_is_left_out() -> None:
    with ExitStack() as stack:
        answering = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        addresses = [one.getsockname() for one in (answering[0], silent, answering[1])]
        reached, why = _reachable(addresses, ["127.0.0.1"], timeout=5.0)
    assert reached == [0, 2]
    port = addresses[1][1]
    itself = "Connection refused, and that is an address of this host itself"
    assert f"cannot reach 127.0.0.1:{port} from 127.0.0.1: {itself}" in why


def test_both_ends_say_from_where_nothing_was_reached() -> None:
    """An address of no interface here, as where --hetero-nics names one that leads elsewhere."""
    *errors, _, _ = opened(["127.0.0.1"], ["192.0.2.1"], timeout=0.3)
    for error in errors:
        assert re.search(r"reach 127.0.0.1:\d+ from 192.0.2.1: Cannot assign", str(error))
    assert "rank 1 says: " in str(errors[0])
