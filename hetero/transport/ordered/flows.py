"""The two directions of one end of an ordered link: what puts their entries into streams.

Large messages go through streams of the link, so that the caller's own work goes on beside them. A
small one goes into the caller's stream where the order allows it: for a few bytes the events that
join two streams cost more than the copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hetero.device.ordered import CurrentStream, OrderedDevice
from hetero.transport.header import Header
from hetero.transport.ordered.ring import COUNTER_MASK, Allotment, Entry, ahead
from hetero.transport.ordered.transfer import Arrival, OrderedEnds, OrderedTransfer

SMALL_BYTES = 256 << 10
"""Up to this a message may go through the caller's stream."""


class EntryRefused(Exception):
    """The peer has sent something else than what is to be received; says what differs."""


class Flow:
    """One direction: what is to be enqueued, and what is on its way."""

    def __init__(
        self,
        device: OrderedDevice,
        ends: OrderedEnds,
        *,
        chunk_bytes: int,
        done_word: int,
        done: Callable[[], int],
    ) -> None:
        self.stream = device.stream()
        self.waiting: deque[OrderedTransfer] = deque()
        self.under_way: deque[OrderedTransfer] = deque()
        self.given_up: list[OrderedTransfer] = []
        """Of a link that has failed: streams may still copy to and from their tensors."""
        self.count = 0
        """Entries enqueued."""
        self.sequence = 0
        self.awaited = 0
        """The last counter value of the peer's that an entry needs."""
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._small_bytes = min(SMALL_BYTES, chunk_bytes)
        self._done_word, self._done = done_word, done
        """The counter that this end's device writes after each entry."""
        self._peer = ends.theirs
        self._caller: int | None = None
        """The caller's stream that the last entry went into; None if it was the link's."""

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

    def _is_settled(self) -> bool:
        """Whether the device is done with all entries so far."""
        return ahead(self.count & COUNTER_MASK, self._done()) <= 0

    def is_small(self, nbytes: int) -> bool:
        """Whether a message is one for the caller's stream."""
        return nbytes <= self._small_bytes

    def _fits(self, transfer: OrderedTransfer, stream: CurrentStream) -> bool:
        """Whether it may go there, behind the entries before it."""
        return (
            stream.key == transfer.caller
            and self.is_small(transfer.nbytes)
            and (self._caller == stream.key or self._is_settled())
        )

    def _take_link_stream(self) -> None:
        """Have the link's stream go on behind what a caller's was given."""
        if self._caller is not None:
            self._caller = None
            if not self._is_settled():
                self.stream.wait_value(self._done_word, self.count & COUNTER_MASK)

    def _begin(self, transfer: OrderedTransfer) -> None:
        if not transfer.begun:
            transfer.begun = True
            if transfer.ready is None:
                transfer.ready = self._device.mark()
            self.stream.wait_for(transfer.ready)

    def _advance(self, transfer: OrderedTransfer, nbytes: int) -> None:
        transfer.offset += nbytes
        if transfer.offset == transfer.nbytes:
            count = self.count & COUNTER_MASK
            transfer.landed = Arrival(
                self._device,
                self._done_word,
                count,
                read=self._done,
                peer=self._peer,
                caller=self._caller,
            )
            self.under_way.append(self.waiting.popleft())


class Outgoing(Flow):
    """What this end sends."""

    def __init__(self, device: OrderedDevice, ends: OrderedEnds, *, chunk_bytes: int) -> None:
        self._direction = direction = ends.outgoing
        super().__init__(
            device,
            ends,
            chunk_bytes=chunk_bytes,
            done_word=direction.produced_word,
            done=lambda: direction.produced,
        )
        self._ring = ends.outgoing_ring
        self.allotment = Allotment(ends.ring_bytes)

    def enqueue(self, stream: CurrentStream | None = None) -> int:
        """Put into streams all that can be; the number of entries.

        `stream` is the caller's, in its call of `send`.
        """
        before = self.count
        while self.waiting:
            transfer = self.waiting[0]
            while transfer.landed is None:
                nbytes = min(self._chunk_bytes, transfer.nbytes - transfer.offset)
                placed = self.allotment.take(nbytes, retired=self._direction.retired)
                if placed is None:
                    return self.count - before
                place, freed = placed
                freed &= COUNTER_MASK
                self.awaited = freed
                must_wait = ahead(freed, self._direction.consumed) > 0
                # A caller's stream, which trains, is not held up until the peer has made room.
                if not must_wait and stream is not None and self._fits(transfer, stream):
                    self._put_with_caller(transfer, stream, place)
                else:
                    self._put(transfer, place, nbytes, after=freed if must_wait else None)
                self._direction.post(
                    transfer.header,
                    offset=transfer.offset,
                    nbytes=nbytes,
                    place=place,
                    count=self.count,
                )
                self._advance(transfer, nbytes)
        return self.count - before

    def _put_with_caller(
        self, transfer: OrderedTransfer, stream: CurrentStream, place: int
    ) -> None:
        self._caller = stream.key
        self.count += 1
        stream.copy_and_write(
            self._ring + place,
            transfer.address,
            transfer.nbytes,
            word=self._done_word,
            value=self.count & COUNTER_MASK,
        )

    def _put(
        self, transfer: OrderedTransfer, place: int, nbytes: int, *, after: int | None
    ) -> None:
        self._take_link_stream()
        self._begin(transfer)
        aside = nbytes < transfer.nbytes or not self._is_settled()
        if after is not None:
            self.stream.wait_value(self._direction.consumed_word, after, aside=aside)
        if nbytes:
            self.stream.copy(self._ring + place, transfer.address + transfer.offset, nbytes)
        self.count += 1
        self.stream.write_value(self._done_word, self.count & COUNTER_MASK, aside=aside)


class Incoming(Flow):
    """What this end receives."""

    def __init__(self, device: OrderedDevice, ends: OrderedEnds, *, chunk_bytes: int) -> None:
        self._direction = direction = ends.incoming
        super().__init__(
            device,
            ends,
            chunk_bytes=chunk_bytes,
            done_word=direction.consumed_word,
            done=lambda: direction.consumed,
        )
        self._ring, self._ring_bytes = ends.incoming_ring, ends.ring_bytes

    def enqueue(
        self, stream: CurrentStream | None = None, *, awaited: OrderedTransfer | None = None
    ) -> int:
        """As `Outgoing.enqueue`; `stream` is the caller's, in its call of `awaited.wait`.

        Raises EntryRefused.
        """
        before = self.count
        while self.waiting:
            if ahead(self._direction.posted, self.count) <= 0:
                break
            transfer = self.waiting[0]
            entry = self._direction.entry(self.count)
            self._verify(entry, transfer)
            is_whole = entry.nbytes == transfer.nbytes
            # What comes after the awaited one must not hold the caller's stream up.
            if awaited is not None and awaited.landed is not None:
                stream = None
            if is_whole and stream is not None and self._fits(transfer, stream):
                self._take_with_caller(transfer, stream, entry)
            else:
                self._take(transfer, entry)
            self._direction.retire(self.count)
            self._advance(transfer, entry.nbytes)
        return self.count - before

    def _take_with_caller(
        self, transfer: OrderedTransfer, stream: CurrentStream, entry: Entry
    ) -> None:
        self._caller = stream.key
        self.count += 1
        count = self.count & COUNTER_MASK
        self.awaited = count
        if ahead(count, self._direction.produced) > 0:
            stream.wait_value(self._direction.produced_word, count)
        stream.copy_and_write(
            transfer.address,
            self._ring + entry.place,
            entry.nbytes,
            word=self._done_word,
            value=count,
        )

    def _take(self, transfer: OrderedTransfer, entry: Entry) -> None:
        self._take_link_stream()
        self._begin(transfer)
        aside = entry.nbytes < transfer.nbytes or not self._is_settled()
        self.count += 1
        count = self.count & COUNTER_MASK
        self.awaited = count
        if ahead(count, self._direction.produced) > 0:
            self.stream.wait_value(self._direction.produced_word, count, aside=aside)
        if entry.nbytes:
            target = transfer.address + transfer.offset
            self.stream.copy(target, self._ring + entry.place, entry.nbytes)
        self.stream.write_value(self._done_word, count, aside=aside)

    def _verify(self, entry: Entry, transfer: OrderedTransfer) -> None:
        if (
            entry.header == transfer.header
            and entry.offset == transfer.offset
            and entry.nbytes <= transfer.nbytes - transfer.offset
            and entry.place + entry.nbytes <= self._ring_bytes
        ):
            return
        try:
            difference = Header.unpack(entry.header).difference(Header.unpack(transfer.header))
        except ValueError as error:
            difference = str(error)
        if difference is None:
            difference = f"{entry.nbytes} bytes at {entry.offset} instead of {transfer.offset}"
        raise EntryRefused(difference)
