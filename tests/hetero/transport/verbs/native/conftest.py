"""NICs that are copies within one process, which every test leaves with nothing open."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from tests.emulated_nic.world import wait_until
from tests.hetero.transport.verbs.native.joined import forwarder_threads
from tests.loopback_nic.library import LoopbackNics, lacking


@pytest.fixture
def nics() -> Iterator[LoopbackNics]:
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    made = LoopbackNics()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield made
    made.mend()
    assert made.open_objects() == 0
    wait_until(lambda: threading.active_count() <= threads)
    assert forwarder_threads() == []
    assert len(os.listdir("/proc/self/fd")) <= files
