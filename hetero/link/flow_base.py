"""The two directions of one end of an ordered link: what is to be enqueued, and what is on its way.

How an entry gets into streams is in python_flows.py and, in C and for GPUs, in native_flows.py.

Large messages go through streams of the link, so that the caller's own work goes on beside them. A
small one goes into the caller's stream where the order allows it: for a few bytes the events that
join two streams cost more than the copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

from hetero.device.ordered import CurrentStream, OrderedDevice
from hetero.link.header import Header
from hetero.link.ring import Direction, Entry
from hetero.link.ring_transfer import Arrival, DoneCounter, OrderedEnds, OrderedTransfer

SMALL_BYTES = 256 << 10
"""Up to this a message may go through the caller's stream: through pinned host memory it holds that
up for 5 us."""
SMALL_BYTES_OF_DEVICE = 1 << 20
"""The same where the data lie in device memory: 4 us from one H200 to another."""


class EntryRefused(Exception):
    """The peer has sent something else than what is to be received; says what differs."""


@dataclass(frozen=True)
class Limits:
    """How messages are cut, and where they go."""

    chunk_bytes: int
    """The largest part that is handed over at once."""
    small_bytes: int
    """The largest message that may go through the caller's stream; no larger than a part."""


class Flow(ABC):
    """One direction of one end."""

    def __init__(
        self,
        device: OrderedDevice,
        ends: OrderedEnds,
        direction: Direction,
        *,
        limits: Limits,
        is_outgoing: bool,
    ) -> None:
        self.waiting: deque[OrderedTransfer] = deque()
        self.under_way: deque[OrderedTransfer] = deque()
        self.given_up: list[OrderedTransfer] = []
        """Of a link that has failed: streams may still copy to and from their tensors."""
        self.sequence = 0
        self._device = device
        self._limits = limits
        self._direction = direction
        self._done = DoneCounter(
            device,
            direction.produced_word if is_outgoing else direction.consumed_word,
            read=(lambda: direction.produced) if is_outgoing else (lambda: direction.consumed),
            peer=ends.theirs,
        )
        self._leaves_ringing = True

    def transfers(self) -> list[OrderedTransfer]:
        return [*self.under_way, *self.waiting]

    def forget_ended(self) -> None:
        """Let go of the tensors of transfers that have ended."""
        while self.under_way and self.under_way[0].done():
            self.under_way.popleft()

    def give_up(self) -> None:
        self.given_up += self.under_way
        self.given_up += (transfer for transfer in self.waiting if transfer.begun)
        self.under_way.clear()
        self.waiting.clear()

    def is_small(self, nbytes: int) -> bool:
        """Whether a message is one for the caller's stream."""
        return nbytes <= self._limits.small_bytes

    def enqueue(
        self, stream: CurrentStream | None = None, *, awaited: OrderedTransfer | None = None
    ) -> bool:
        """Put into streams all that can be; whether the peer is to be rung for it.

        `stream` is the caller's, in its call of `send` or of `awaited.wait`. Raises EntryRefused.
        """
        moved = False
        while self.waiting:
            transfer = self.waiting[0]
            before = transfer.offset
            # What comes after the awaited one must not hold the caller's stream up.
            if awaited is not None and awaited.landed is not None:
                stream = None
            if not self._bring_on(transfer, stream):
                return self._leaves_ringing and (moved or transfer.offset != before)
            transfer.landed = Arrival(self._done, self.count, self._caller())
            self.under_way.append(self.waiting.popleft())
            moved = True
        return self._leaves_ringing and moved

    @property
    @abstractmethod
    def count(self) -> int:
        """Entries enqueued."""

    @property
    @abstractmethod
    def awaited(self) -> int:
        """The last counter value of the peer's that an entry needs."""

    @abstractmethod
    def broken(self) -> str | None:
        """Why the streams have stopped by themselves; None while they have not."""

    @abstractmethod
    def _bring_on(self, transfer: OrderedTransfer, stream: CurrentStream | None) -> bool:
        """Put into streams what can be of one message; whether that is all of it."""

    @abstractmethod
    def _caller(self) -> int | None:
        """The caller's stream that the last entry went into; None if it was the link's."""


def refusal(entry: Entry, transfer: OrderedTransfer) -> str:
    """What of an entry is not as the transfer expects it."""
    try:
        difference = Header.unpack(entry.header).difference(Header.unpack(transfer.header))
    except ValueError as error:
        return str(error)
    return difference or f"{entry.nbytes} bytes at {entry.offset} instead of {transfer.offset}"
