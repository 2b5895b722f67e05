"""A link whose streams run beside Python, without its lock. They are *emulated*."""

from __future__ import annotations

import random

import pytest
import torch

from tests.hetero.transport.ordered.pair import opened
from tests.stream_driver.library import DeviceInC, lacking

pytestmark = pytest.mark.skipif(lacking() is not None, reason=lacking() or "")


@pytest.mark.parametrize("memory", ["host", "device"])
def test_many_messages_of_all_sizes_cross_both_ways_at_once(memory: str) -> None:
    chance = random.Random(memory)
    sizes = [chance.choice([0, 1, 100, 16 << 10, 16385, 70_000, 200_000]) for _ in range(300)]
    with opened(memory, device=DeviceInC) as pair:  # type: ignore[arg-type]
        ways = [(pair.sender, pair.receiver, 0), (pair.receiver, pair.sender, 100)]
        for begin in range(0, len(sizes), 20):
            works, arrived = [], []
            for number, size in enumerate(sizes[begin : begin + 20]):
                for source, sink, shift in ways:
                    sent = (torch.arange(size) + number + shift).to(torch.uint8)
                    target = torch.zeros_like(sent)
                    works += [source.send(sent), sink.recv(target)]
                    arrived.append((target, sent))
            for work in works:
                work.wait()
            assert all(torch.equal(target, sent) for target, sent in arrived), begin
