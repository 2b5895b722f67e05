"""A world of emulated NICs for each test, which must leave nothing open in it."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator

import pytest

from tests.emulated_nic.world import World, two_rails, wait_until


@pytest.fixture
def world() -> Iterator[World]:
    """Two rails; every test is also one of what is left behind, whatever went wrong in it."""
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    made = two_rails(uuid.uuid4().hex)
    yield made
    assert made.open_objects == 0
    wait_until(lambda: threading.active_count() <= threads)
    assert len(os.listdir("/proc/self/fd")) <= files
