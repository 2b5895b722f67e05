"""Both ends of an ordered link in one process, over streams that are emulated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hetero.device.device import Event
from hetero.link.handshake import Rendezvous
from hetero.link.header import Header
from hetero.link.ring import Direction, RingOptions
from hetero.link.ring_link import RingLink, RingTransfer
from hetero.link.shared_memory import open_shared_memory
from tests.emulated_streams import EmulatedDevice
from tests.hetero.link.joined import JoinedEnds

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


class Pair(NamedTuple):
    """Both ends of one link, in one process."""

    sender: RingLink
    receiver: RingLink
    devices: tuple[Any, Any]


@dataclass(frozen=True)
class Setup(JoinedEnds):
    transport: str = "shm"
    ring_bytes: tuple[int, int] = (64 << 10, 64 << 10)

    def open(self, rendezvous: Rendezvous) -> RingLink:
        rank = rendezvous.description.rank
        options = RingOptions(self.transport, self.ring_bytes[rank], 16 << 10, self.devices[rank])
        return open_shared_memory(rendezvous, options)


@contextmanager
def opened(
    transport: str = "shm", *, timeout: float = 20.0, device: Callable[[], Any] = HeldDevice
) -> Iterator[Pair]:
    devices = device(), device()
    with Setup(transport=transport, timeout=timeout, devices=devices).links() as links:
        try:
            yield Pair(*links, devices)
        finally:
            for end in devices:
                if isinstance(end, HeldDevice):
                    end.released.set()


def recv_from_held(pair: Pair) -> tuple[Any, Any]:
    """A send whose device never gets there, and its receive, whose stream waits for it."""
    pair.devices[0].held = True
    sending = pair.sender.send(torch.ones(LARGE))
    receiving: Any = pair.receiver.recv(torch.zeros(LARGE))
    pair.receiver.progress_until_enqueued(receiving)
    return sending, receiving


def number_of(transfer: RingTransfer) -> int:
    """Of its message."""
    return Header.unpack(transfer.header).sequence


def cross(pair: Pair, sent: torch.Tensor) -> bool:
    target = torch.zeros_like(sent)
    receiving = pair.receiver.recv(target)
    sending = pair.sender.send(sent)
    receiving.wait()
    sending.wait()
    return torch.equal(target, sent)


def count_from(count: int, *, flows: Sequence[Any], directions: Sequence[Direction]) -> None:
    """As if so many entries had gone from one flow to the other, over both their directions."""
    for flow in flows:
        flow._state.count = flow._state.freed = flow._state.begun = count
    for direction in directions:
        for index in (direction._posted, direction._retired):
            direction._words[index] = count
        for sender in (False, True):
            direction.unblock(count, sender=sender)
