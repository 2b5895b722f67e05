"""Two ends of a link find each other, and nobody else gets in."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from hetero.errors import LinkError
from hetero.link.base import LinkDescription
from hetero.link.handshake import Rendezvous, _token, accept, connect, look_up
from hetero.startup.store import BoundedStore


def rendezvous(
    rank: int,
    store: dist.Store,
    *,
    secret: str = "only this job knows",
    link_timeout: float = 5.0,
    **changes: Any,
) -> Rendezvous:
    """Of a link whose own timeout, beside that of meeting, is `link_timeout`."""
    description = LinkDescription(
        rank=rank,
        peer=1 - rank,
        stage=rank,
        peer_stage=1 - rank,
        secret=secret,
        timeout=link_timeout,
    )
    one = Rendezvous(
        store=BoundedStore(store),
        description=description,
        name="edge 0/0-1",
        timeout=60.0,
    )
    return replace(one, **changes)


def both(listener: Callable[[], Any], caller: Callable[[], Any]) -> list[Any]:
    """What the two ends return or raise, run at the same time."""
    pool = ThreadPoolExecutor()
    calls = [pool.submit(side) for side in (listener, caller)]
    pool.shutdown(wait=False)
    return [call.exception(120) or call.result() for call in calls]


def both_well(*ends: Callable[[], Any]) -> list[Any]:
    """What the two ends return, run at the same time; what one of them raises ends the test."""
    results = both(*ends)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def dial(server: socket.socket, store: dist.Store, **changes: Any) -> socket.socket:
    return connect(server.getsockname(), rendezvous(1, store, **changes), family=socket.AF_INET)


@pytest.mark.parametrize(
    "changes", [{"secret": "another job"}, {"name": "edge 1/1-2"}], ids=["secret", "link"]
)
def test_a_stranger_is_turned_away_and_told(server: socket.socket, changes: dict) -> None:
    store = dist.HashStore()
    refused, error = both(
        lambda: accept(server, rendezvous(0, store, timeout=2.0)),
        lambda: dial(server, store, timeout=2.0, **changes),
    )
    assert isinstance(error, LinkError)
    assert isinstance(refused, LinkError)
    assert "rank 1 did not connect within 2 s" in str(refused)


def test_the_listener_goes_on_after_a_stranger(server: socket.socket) -> None:
    store = dist.HashStore()

    def strangers_first() -> socket.socket:
        with socket.create_connection(server.getsockname()) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64)
        with socket.create_connection(server.getsockname()):
            pass
        # One that the peer itself has given up, and one that stays and says nothing.
        with socket.create_connection(server.getsockname()) as given_up:
            given_up.sendall(_token(rendezvous(1, store), of_listener=False))
        with socket.create_connection(server.getsockname()) as silent:
            silent.sendall(b"x")
            return dial(server, store)

    accepted, called = both(lambda: accept(server, rendezvous(0, store)), strangers_first)
    called.sendall(b"hello")
    assert accepted.recv(5) == b"hello"
    accepted.close()
    called.close()


class LostStore(dist.HashStore):
    def check(self, *_: Any) -> bool:
        raise dist.DistNetworkError(
            "Connection was likely closed.\nException raised from recvBytes"
        )


def test_a_store_whose_host_has_ended_is_not_called_a_peers_silence() -> None:
    with pytest.raises(LinkError) as lost:
        look_up(rendezvous(0, LostStore()), "address")
    assert "could not be opened: the process that hosts the store" in str(lost.value)


def test_an_end_that_says_nothing_is_an_error_in_time() -> None:
    with pytest.raises(LinkError, match="rank 1 did not answer within 2 s; see its log"):
        look_up(rendezvous(0, dist.HashStore(), timeout=2.0), "address")


def test_a_fork_keeps_no_connection_open(server: socket.socket) -> None:
    """Else the peer of a rank that was killed would take it for alive while a child of it runs."""
    store = dist.HashStore()
    ours, theirs = both(lambda: accept(server, rendezvous(0, store)), lambda: dial(server, store))
    child = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
    child.start()
    try:
        ours.close()
        theirs.settimeout(10.0)
        assert theirs.recv(1) == b""
        theirs.close()
    finally:
        child.kill()
        child.join()
