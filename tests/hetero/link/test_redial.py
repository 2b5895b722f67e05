"""What opens a link's connections again, and whom it lets in."""

from __future__ import annotations

import os
import resource
import secrets
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from hetero.link import redial
from hetero.link.redial import Place, Redial, Reopened, Route
from hetero.link.tcp import tune
from tests.hetero.link.joined import wait_for
from tests.hetero.link.test_handshake import rendezvous

RAIL = Place("rail", 1)


@contextmanager
def redials(*, secret: str = "only this job knows") -> Iterator[tuple[Redial, Redial]]:
    """Of the listener and of a caller with this secret."""
    store = dist.HashStore()
    listener = socket.create_server(("127.0.0.1", 0))
    routes = {RAIL: Route("127.0.0.1", listener.getsockname())}
    one = Redial(rendezvous(0, store), patience=5.0, tune=tune, listeners=[listener])
    caller = rendezvous(1, store, secret=secret)
    other = Redial(caller, patience=5.0, tune=tune, routes=routes)
    yield one, other
    one.close()
    other.close()


def reopened(
    one: Redial, other: Redial, admit: Callable[[Place, int], bool]
) -> list[list[Reopened]]:
    """What either end has opened again once the caller's attempt has ended."""
    made: list[list[Reopened]] = [[], []]
    is_over = threading.Event()

    def listen() -> bool:
        made[0] += one.progress(admit)
        return is_over.is_set()

    def dial() -> bool:
        made[1] += other.progress(admit)
        return not other.is_dialing(RAIL)

    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(wait_for, listen, 30)
        assert wait_for(dial, 20)
        is_over.set()
        assert listening.result()
    return made


def test_a_connection_replaces_the_named_one_and_strangers_are_refused() -> None:
    with redials() as (one, other):
        address = other._routes[RAIL].address
        with socket.create_connection(address), socket.create_connection(address) as guessing:
            guessing.sendall(secrets.token_bytes(32))
            other.dial(RAIL, 3)
            ((here,), (there,)) = reopened(one, other, lambda place, n: (place, n) == (RAIL, 3))
            with here.connection, there.connection:
                assert (here.place, here.opening) == (there.place, there.opening) == (RAIL, 3)
                here.connection.sendall(b"after")
                assert there.connection.recv(5) == b"after"
            guessing.settimeout(20)
            assert guessing.recv(1) == b""


@pytest.mark.parametrize(
    ("secret", "admitted"), [("only this job knows", False), ("of another job", True)]
)
def test_neither_a_connection_that_is_not_admitted_nor_one_of_another_job_is_opened(
    secret: str, admitted: bool
) -> None:
    with redials(secret=secret) as (one, other):
        other.dial(RAIL, 1)
        assert reopened(one, other, lambda place, number: admitted) == [[], []]
        assert "127.0.0.1" in other.failure


def test_a_caller_that_is_refused_knows_for_how_long() -> None:
    with redials() as (one, other):
        one.close()
        for _ in range(2):
            other.dial(RAIL, 1)
            assert wait_for(lambda: not (list(other.progress(bool)) or other.is_dialing(RAIL)))
        assert other.refused_seconds() > 0
        assert "Connection refused" in other.failure


@pytest.mark.parametrize("says", [b"", secrets.token_bytes(16)], ids=["nothing", "half-a-token"])
def test_an_attempt_that_is_not_answered_is_given_up(
    monkeypatch: pytest.MonkeyPatch, says: bytes
) -> None:
    monkeypatch.setattr(redial, "_DIAL_SECONDS", 0.2)
    with redials() as (_, other), socket.create_server(("127.0.0.1", 0)) as silent:
        other._routes = {RAIL: Route("127.0.0.1", silent.getsockname())}
        other.dial(RAIL, 1)
        connection, _ = silent.accept()
        with connection:
            connection.sendall(says)
            assert wait_for(lambda: not (list(other.progress(bool)) or other.is_dialing(RAIL)))
    assert other.failure.endswith(": nothing answers")
    assert other.refused_seconds() == 0


def test_a_caller_that_says_half_a_token_holds_up_no_other() -> None:
    with redials() as (one, other), socket.create_connection(other._routes[RAIL].address) as slow:
        slow.sendall(secrets.token_bytes(16))
        other.dial(RAIL, 1)
        ((here,), (there,)) = reopened(one, other, lambda place, number: True)
        with here.connection, there.connection:
            assert here.place == there.place == RAIL


@contextmanager
def without_descriptors() -> Iterator[None]:
    """In which this process can open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_listener_without_descriptors_rests_and_accepts_later() -> None:
    with redials() as (one, other):
        other.dial(RAIL, 1)
        assert wait_for(lambda: select.select([one], [], [], 0)[0])
        with without_descriptors():
            assert list(one.progress(bool)) == []
            # Readable no more, or whoever watches it would not rest either.
            assert select.select([one], [], [], 0)[0] == []
            assert one.is_pending
        ((here,), (there,)) = reopened(one, other, lambda place, number: True)
        with here.connection, there.connection:
            assert here.place == there.place == RAIL
