"""NICs that are copies within one process, which every test leaves with nothing open."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hetero.link.joined import threads_named, wait_until
from tests.loopback_nic.library import LoopbackNics, lacking


@pytest.fixture
def nics(tmp_path: Path) -> Iterator[LoopbackNics]:
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    made = LoopbackNics(tmp_path / "sys")
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with made.in_place():
        yield made
    made.mend()
    assert made.open_objects() == 0
    wait_until(lambda: threading.active_count() <= threads)
    assert threads_named("hetero-carrier") == []
    assert len(os.listdir("/proc/self/fd")) <= files
