"""Both ends of an ordered link in one process, over streams that are emulated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hetero.device.device import Event
from hetero.errors import LinkError
from hetero.link.ring import Direction
from hetero.link.ring_link import RingLink
from hetero.link.ring_options import RingOptions
from hetero.link.same_host import open_same_host
from hetero.native.structures import (
    Step,
)
from tests.emulated_streams import EmulatedDevice
from tests.hetero.link.test_handshake import both, rendezvous

SHORT = 1.0
LARGE = 5_000
"""Elements of a message that goes through streams of the link."""


class HeldDevice(EmulatedDevice):
    """A device whose next sends can be held back: its work before them never ends."""

    def __init__(self) -> None:
        super().__init__()
        self.held = False
        self.released = threading.Event()

    def record_event(self) -> Event:
        return self.driver_for_c.know_event(self.released) if self.held else super().record_event()


class Pair:
    """Both ends of one link, in one process."""

    def __init__(
        self, transport: str, *, timeout: float, device: Callable[[], Any] = HeldDevice
    ) -> None:
        store = dist.HashStore()
        self.devices = [device(), device()]

        def open_end(rank: int) -> RingLink:
            options = RingOptions(transport, 64 << 10, 16 << 10, self.devices[rank])
            return open_same_host(
                rendezvous(rank, store, link_timeout=timeout, timeout=20.0), options
            )

        opened: list[Any] = both(lambda: open_end(0), lambda: open_end(1))
        self.sender: RingLink = opened[0]
        self.receiver: RingLink = opened[1]


@contextmanager
def opened(
    transport: str = "shm", *, timeout: float = 20.0, device: Callable[[], Any] = HeldDevice
) -> Iterator[Pair]:
    pair = Pair(transport, timeout=timeout, device=device)
    try:
        yield pair
    finally:
        for end in pair.devices:
            if isinstance(end, HeldDevice):
                end.released.set()
        both(pair.sender.close, pair.receiver.close)


def wait_for(condition: Any, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def is_broken(link: RingLink) -> bool:
    try:
        link.check()
    except LinkError:
        return True
    return False


def cross(pair: Pair, sent: torch.Tensor) -> bool:
    target = torch.zeros_like(sent)
    receiving = pair.receiver.recv(target)
    sending = pair.sender.send(sent)
    receiving.wait()
    sending.wait()
    return torch.equal(target, sent)


def start_counting_at(pair: Pair, count: int) -> None:
    """As if so many entries had gone from the sender to the receiver."""
    count_from(
        count,
        flows=(pair.sender._out, pair.receiver._in),
        directions=(pair.sender._ends.outgoing, pair.receiver._ends.incoming),
    )


def count_from(count: int, *, flows: Sequence[Any], directions: Sequence[Direction]) -> None:
    """As if so many entries had gone from one flow to the other, over both their directions."""
    for flow in flows:
        flow._state.count = flow._state.freed = count
    for direction in directions:
        for index in (direction._posted, direction._retired):
            direction._words[index] = count
        direction.unblock_receiver(count)
        direction.unblock_sender(count)


def pretend_to_await(flow: Any, value: int) -> None:
    """As if an entry needed this value of the peer's counter."""
    flow._state.awaited = value


def before_each_move(link: RingLink, act: Callable[[], None]) -> None:
    """Act whenever what the link sends is given to its device."""
    device = link._device
    assert isinstance(device, EmulatedDevice)

    def at_copies(step: Step) -> int:
        if step is Step.COPY:
            act()
        return 0

    device.driver_for_c.before = at_copies
