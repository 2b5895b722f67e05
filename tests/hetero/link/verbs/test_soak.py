"""Very many messages over RDMA. NICs are *emulated*, in one process."""

from __future__ import annotations

import random
import threading
from collections import deque

import pytest
import torch

from hetero.link.base import Work
from hetero.link.ring_link import RingLink
from tests.hetero.link.verbs.ends import Setup
from tests.loopback_nic.library import LoopbackNics

MESSAGES, WINDOW, LARGEST = 100_000, 64, 64 << 10


class End:
    """One rank: random sizes both ways, a window of them in flight, every byte compared."""

    def __init__(self, link: RingLink, rank: int) -> None:
        self._link = link
        self._chances = [random.Random(rank), random.Random(1 - rank)]
        self._noise = [
            torch.randint(0, 256, (LARGEST,), dtype=torch.uint8, generator=_generator(seed))
            for seed in (rank, 1 - rank)
        ]
        self.compared = 0
        self.thread = threading.Thread(target=self._exchange, name=f"soak {rank}")

    def _exchange(self) -> None:
        flights: deque[tuple[Work, Work, torch.Tensor, torch.Tensor]] = deque()
        for _ in range(MESSAGES):
            source, expected = (
                noise[chance.randrange(LARGEST // 2) :][: chance.randrange(LARGEST // 2)]
                for chance, noise in zip(self._chances, self._noise, strict=True)
            )
            target = torch.empty_like(expected)
            works = self._link.send(source), self._link.recv(target)
            flights.append((*works, target, expected))
            if len(flights) == WINDOW:
                self._land(*flights.popleft())
        while flights:
            self._land(*flights.popleft())

    def _land(
        self, sent: Work, received: Work, target: torch.Tensor, expected: torch.Tensor
    ) -> None:
        received.wait()
        sent.wait()
        if torch.equal(target, expected):
            self.compared += 1


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_thousand_messages_arrive_once_and_unchanged(nics: LoopbackNics) -> None:
    setup = Setup(nics, ring_bytes=(2 << 20, 2 << 20), chunk_bytes=64 << 10)
    with setup.links() as links:
        ends = [End(link, rank) for rank, link in enumerate(links)]
        for end in ends:
            end.thread.start()
        for end in ends:
            end.thread.join()
        assert [end.compared for end in ends] == [MESSAGES] * 2
        assert [link.counters.messages_received for link in links] == [MESSAGES] * 2
