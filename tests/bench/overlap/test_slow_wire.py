"""A link behind a slow wire: the same bytes, each part when the wire lets it go."""

from __future__ import annotations

import pytest
import torch

from bench.overlap.slow_wire import HostWire
from hetero.device.host import HostDevice
from hetero.link.handshake import Rendezvous
from hetero.link.ring import RingOptions
from hetero.link.ring_link import RingLink
from hetero.link.shared_memory import open_shared_memory
from tests.hetero.link.joined import CPU, joined, noise

NBYTES = 1 << 20
BYTES_PER_S = 20e6


def _open(rendezvous: Rendezvous) -> RingLink:
    options = RingOptions("shm", 4 * NBYTES, NBYTES // 2, HostDevice(CPU))
    return open_shared_memory(rendezvous, options)


def test_messages_cross_whole_and_part_by_part_as_the_wire_lets_go() -> None:
    with joined(_open) as (sender, receiver):
        there, back = HostWire(sender._out), HostWire(receiver._out)
        there.bytes_per_s = BYTES_PER_S
        sent = [noise(NBYTES, seed) for seed in range(3)]
        got = [torch.empty_like(tensor) for tensor in sent]
        works = [receiver.recv(tensor) for tensor in got]
        for tensor in sent:
            sender.send(tensor)
        for work in works:
            work.wait()
        assert there.let_go == 3 * 2, "each part waits until the wire has let it go"
        assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))
        assert there.seconds() == {
            BYTES_PER_S: (3 * NBYTES, pytest.approx(3 * NBYTES / BYTES_PER_S))
        }
        assert back.seconds() == {}
