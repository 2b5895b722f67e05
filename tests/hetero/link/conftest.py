"""Every transport of the contract in turn; rails that tests of carried links open and break."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetero.native.binding import proxy
from tests.hetero.link.contract import Pair
from tests.hetero.link.joined import threads_named, wait_for
from tests.hetero.link.tcp_ends import Network
from tests.hetero.link.transports import Transport, of_this_machine
from tests.loopback_nic.library import LoopbackNics, lacking


@pytest.fixture(scope="module", params=of_this_machine(present=True))
def transport(request: pytest.FixtureRequest) -> Transport:
    chosen: Transport = request.param
    return chosen


@pytest.fixture(scope="module")
def pair(transport: Transport) -> Iterator[Pair]:
    """The two processes that a module's tests of a transport share."""
    with Pair(transport) as both:
        yield both


@pytest.fixture
def header_pair(transport: Transport, pair: Pair) -> Pair:
    if not transport.has_header:
        pytest.skip(f"{transport} sends no header, so it cannot see that the two sides differ")
    return pair


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Links end their threads and close their files, whatever happened to them.

    The process's own, which serve all links, are left.
    """
    proxy()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    assert wait_for(lambda: threading.active_count() <= threads)
    assert [len(threads_named(f"hetero-{name}")) for name in ("proxy", "send", "receive")] in (
        [1, 0, 0],
        [1, 4, 4],
    )
    assert len(os.listdir("/proc/self/fd")) <= files


@pytest.fixture
def leaving_nothing() -> Iterator[None]:
    with nothing_left_behind():
        yield


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """The connections of TCP links, which are known as they are made."""
    with nothing_left_behind():
        made = Network(monkeypatch)
        yield made
        made.close()


@pytest.fixture
def nics(tmp_path: Path) -> Iterator[LoopbackNics]:
    """NICs that are copies within one process, which every test leaves with nothing open."""
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    made = LoopbackNics(tmp_path / "sys")
    with nothing_left_behind():
        with made.in_place():
            yield made
        made.mend()
        assert made.open_objects() == 0
