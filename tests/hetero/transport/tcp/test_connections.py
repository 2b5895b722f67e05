"""Where the connections of a TCP link run, and what is asked of the kernel for them."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from hetero.errors import LinkError
from hetero.transport.chunked import RingShape
from hetero.transport.handshake import Meeting
from hetero.transport.tcp import connections
from hetero.transport.tcp.connections import (
    TcpPaths,
    address_towards,
    interface_address,
    open_connections,
)
from tests.hetero.transport.test_handshake import both, meeting

SHAPE = RingShape(slots=4, slot_bytes=1 << 16)


def opened(
    folder: Path,
    *paths: TcpPaths,
    shapes: tuple[RingShape, ...] = (SHAPE, SHAPE),
    timeout: float = 5.0,
) -> list:
    """What each end is given: its outgoing and its incoming connections."""
    stores = [dist.FileStore(str(folder / "store"), 2) for _ in range(2)]
    return both(
        *(
            lambda rank=rank: open_connections(
                meeting(rank, stores[rank], timeout=timeout), shape=shapes[rank], paths=paths[rank]
            )
            for rank in range(2)
        )
    )


def close(ends: list) -> None:
    for outgoing, incoming in ends:
        for connection in (*outgoing, *incoming):
            connection.close()


def test_each_direction_has_its_connections_spread_over_the_addresses(tmp_path: Path) -> None:
    listener = TcpPaths(addresses=("127.0.0.1", "127.0.0.2"), connections=4)
    caller = TcpPaths(addresses=("127.0.0.3", "127.0.0.4"), connections=4)
    ends = opened(tmp_path, listener, caller)
    for (outgoing, incoming), addresses in zip(ends, (listener, caller), strict=True):
        for direction in (outgoing, incoming):
            used = [connection.getsockname()[0] for connection in direction]
            assert used == [*addresses.addresses] * 2
    close(ends)


def test_the_outgoing_connections_of_one_are_the_incoming_of_the_other(tmp_path: Path) -> None:
    paths = TcpPaths(addresses=("127.0.0.1",), connections=3)
    ends = opened(tmp_path, paths, paths)
    for sender, receiver in ((0, 1), (1, 0)):
        there = [connection.getpeername() for connection in ends[sender][0]]
        assert there == [connection.getsockname() for connection in ends[receiver][1]]
    close(ends)


def test_a_peer_that_never_says_its_parameters_is_an_error_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = connections.compare

    def one_is_silent(connection: socket.socket, ours: Meeting, mine: dict) -> None:
        if ours.description.rank == 0:
            honest(connection, ours, mine)
        else:
            time.sleep(1.0)

    monkeypatch.setattr(connections, "compare", one_is_silent)
    paths = TcpPaths(addresses=("127.0.0.1",), connections=1)
    error, _ = opened(tmp_path, paths, paths, timeout=0.5)
    assert isinstance(error, LinkError)
    assert "rank 1 ended the opening" in str(error)


def test_ends_that_cut_their_messages_differently_do_not_go_on(tmp_path: Path) -> None:
    paths = TcpPaths(addresses=("127.0.0.1",), connections=1)
    other = RingShape(slots=4, slot_bytes=1 << 17)
    errors = opened(tmp_path, paths, paths, shapes=(SHAPE, other))
    assert all(isinstance(error, LinkError) for error in errors)
    assert all("slot_bytes" in str(error) for error in errors)


@pytest.mark.parametrize("within_host", [True, False])
def test_buffers_are_small_within_a_host_and_the_kernels_own_between_hosts(
    tmp_path: Path, within_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = "127.0.0.1" if within_host else "192.0.2.1"
    entry = SimpleNamespace(family=socket.AF_INET, address=ours)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"emulated": [entry]})
    paths = TcpPaths(addresses=("127.0.0.1",), connections=1)
    ends = opened(tmp_path, paths, paths)
    sizes = [
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        for outgoing, incoming in ends
        for connection in (*outgoing, *incoming)
    ]
    close(ends)
    # The kernel doubles what it is asked for, to have room for its own needs.
    assert all((size == 2 * (256 << 10)) == within_host for size in sizes), sizes


def test_an_interface_that_does_not_exist_has_no_address() -> None:
    assert interface_address("no such interface") is None
    assert interface_address("lo") == "127.0.0.1"


def test_the_address_towards_this_host_is_its_own() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
