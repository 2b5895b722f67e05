"""A link within one host: what is left, and what the other end hears, where one cannot be made."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from hetero.device.host import HostDevice
from hetero.errors import LinkError
from hetero.link.ring_link import RingLink
from hetero.link.ring_options import RingOptions
from hetero.link.same_host import open_same_host
from tests.hetero.link.conftest import nothing_left_behind
from tests.hetero.link.joined import CPU
from tests.hetero.link.test_handshake import both, rendezvous


def test_an_end_whose_thread_cannot_be_started_leaves_nothing_and_the_other_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, start = dist.HashStore(), threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == "shm 0-1 watch":
            raise RuntimeError("can't start new thread")
        start(thread)

    def open_at(rank: int) -> RingLink:
        options = RingOptions("shm", 64 << 10, 16 << 10, HostDevice(CPU))
        return open_same_host(rendezvous(rank, store, link_timeout=20.0), options)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    with nothing_left_behind():
        failed, other = both(lambda: open_at(0), lambda: open_at(1))
        assert isinstance(failed, LinkError)
        assert "no thread could be started" in str(failed)
        with other, pytest.raises(LinkError, match="rank 0 has ended"):
            other.recv(torch.zeros(5)).wait()
