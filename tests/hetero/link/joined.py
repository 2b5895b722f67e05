"""Both ends of a carried link in one process, and what tests have them do."""

from __future__ import annotations

import random
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetero.device.device import Device
from hetero.device.host import HostDevice
from hetero.errors import LinkError
from hetero.link.base import Work
from hetero.link.handshake import Rendezvous
from hetero.link.ring_link import RingLink
from tests.hetero.link.test_handshake import both, both_well, rendezvous

CPU = torch.device("cpu")
MESSAGES = 40
OpenEnd = Callable[[Rendezvous], RingLink]
Both = tuple[RingLink, RingLink]


@contextmanager
def joined(open_end: OpenEnd, *, timeout: float = 20.0) -> Iterator[Both]:
    """Both links, which are closed at the end in whatever state they are."""
    one, other = both_well(*_opening(open_end, timeout))
    try:
        yield one, other
    finally:
        both_well(one.close, other.close)


def tried(open_end: OpenEnd) -> list[Any]:
    """What each end comes to: its link, or the error with which opening it fails."""
    return both(*_opening(open_end, timeout=20.0))


def _opening(open_end: OpenEnd, timeout: float) -> list[Callable[[], RingLink]]:
    store = dist.HashStore()
    return [
        partial(open_end, rendezvous(rank, store, link_timeout=timeout, timeout=20.0))
        for rank in range(2)
    ]


@dataclass(frozen=True, kw_only=True)
class JoinedEnds(ABC):
    """How the two ends of a carried link are opened."""

    timeout: float = 20.0
    devices: tuple[Device, ...] = field(default_factory=lambda: (HostDevice(CPU), HostDevice(CPU)))

    @abstractmethod
    def open(self, rendezvous: Rendezvous) -> RingLink: ...

    @contextmanager
    def links(self) -> Iterator[Both]:
        """Both links, which are closed at the end in whatever state they are."""
        with joined(self.open, timeout=self.timeout) as links:
            yield links

    def errors(self) -> list[str]:
        """The texts of both ends' errors; opening must fail at both."""
        errors = tried(self.open)
        assert [type(error) for error in errors] == [LinkError] * 2
        return list(map(str, errors))


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def stream(
    sender: RingLink,
    receiver: RingLink,
    *,
    nbytes: int,
    before: Callable[[int], None] = lambda number: None,
) -> int:
    """Send messages and compare them; how many came out right."""
    right = 0
    for number in range(MESSAGES):
        before(number)
        sent = noise(nbytes, number)
        target = torch.zeros_like(sent)
        sending, receiving = sender.send(sent), receiver.recv(target)
        receiving.wait()
        sending.wait()
        sender.check()
        receiver.check()
        right += torch.equal(sent, target)
    return right


def assert_both_ways_arrive(
    links: Both, chance: random.Random, *, sizes: Sequence[int], before: Callable[[int], None]
) -> None:
    """Send messages of any of these sizes both ways at once, some at a time, and compare them."""
    flights: deque[tuple[Work, Work, torch.Tensor, torch.Tensor]] = deque()
    for number in range(MESSAGES):
        before(number)
        for one, other in (links, links[::-1]):
            sent = noise(chance.choice(sizes), number)
            target = torch.zeros_like(sent)
            flights.append((one.send(sent), other.recv(target), sent, target))
        while len(flights) > (6 if number < MESSAGES - 1 else 0):
            sending, receiving, sent, target = flights.popleft()
            receiving.wait()
            sending.wait()
            for link in links:
                link.check()
            assert torch.equal(sent, target)


@contextmanager
def meanwhile(action: Callable[[], object]) -> Iterator[threading.Thread]:
    """Do something in a thread, which has to be over soon after the block, and without an error."""
    errors: list[BaseException] = []

    def act() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    yield thread
    thread.join(120)
    assert not thread.is_alive()
    assert errors == []


def at(number: int, action: Callable[[], None]) -> Callable[[int], None]:
    return lambda now: action() if now == number else None


def is_broken(link: RingLink) -> bool:
    try:
        link.check()
    except LinkError:
        return True
    return False


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether it has come true, even if only for a moment."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def threads_named(name: str) -> list[Path]:
    """This process's threads of a name that C gave them, in /proc."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        # Others of the process's threads may end meanwhile, also between open and read.
        with suppress(FileNotFoundError, ProcessLookupError):
            if (task / "comm").read_text().strip() == name:
                found.append(task)
    return found


def times_asleep(threads: Iterable[str]) -> Counter[str]:
    """How often each of these threads of this process, by its number, has gone to sleep."""
    found: Counter[str] = Counter()
    for thread in threads:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            status = Path(f"/proc/self/task/{thread}/status").read_text()
            found[thread] = int(re.findall(r"\nvoluntary\D+(\d+)", status)[0])
    return found
