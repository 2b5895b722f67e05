"""Every TCP link leaves nothing behind, whatever happened to it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from tests.hetero.link.joined import threads_named, wait_until
from tests.hetero.link.tcp.ends import Network


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    made = Network(monkeypatch)
    yield made
    made.close()
    wait_until(lambda: threading.active_count() <= threads)
    assert [threads_named(n) for n in ("hetero-carrier", "tcp-send", "tcp-receive")] == [[], [], []]
    assert len(os.listdir("/proc/self/fd")) <= files
