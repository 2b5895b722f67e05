"""Entries of an ordered link enqueued by Python, for every device."""

from __future__ import annotations

from hetero.device.ordered import CurrentStream, OrderedDevice, Word
from hetero.transport.ordered.flows import EntryRefused, Flow, Limits, refusal
from hetero.transport.ordered.ring import COUNTER_MASK, Allotment, Direction, Entry, ahead
from hetero.transport.ordered.transfer import OrderedEnds, OrderedTransfer


class _PythonFlow(Flow):
    def __init__(
        self,
        device: OrderedDevice,
        ends: OrderedEnds,
        direction: Direction,
        *,
        limits: Limits,
        is_outgoing: bool,
    ) -> None:
        super().__init__(device, ends, direction, limits=limits, is_outgoing=is_outgoing)
        self.stream = device.stream()
        self._count = 0
        self._awaited = 0
        self._last_caller: int | None = None

    @property
    def count(self) -> int:
        return self._count

    @property
    def awaited(self) -> int:
        return self._awaited

    def _caller(self) -> int | None:
        return self._last_caller

    def _is_settled(self) -> bool:
        """Whether the device is done with all entries so far."""
        return self._done.has_come_to(self.count)

    def _fits(self, transfer: OrderedTransfer, stream: CurrentStream) -> bool:
        """Whether it may go there, behind the entries before it."""
        return (
            stream.key == transfer.caller
            and self.is_small(transfer.nbytes)
            and (self._last_caller == stream.key or self._is_settled())
        )

    def _take_link_stream(self) -> None:
        """Have the link's stream go on behind what a caller's was given."""
        if self._last_caller is not None:
            self._last_caller = None
            if not self._is_settled():
                self.stream.wait_value(self._done.word(self.count))

    def _begin(self, transfer: OrderedTransfer) -> None:
        if not transfer.begun:
            transfer.begun = True
            if transfer.ready is None:
                transfer.ready = self._device.mark()
            self.stream.wait_for(transfer.ready)


class PythonOutgoing(_PythonFlow):
    """What this end sends."""

    def __init__(self, device: OrderedDevice, ends: OrderedEnds, *, limits: Limits) -> None:
        super().__init__(device, ends, ends.outgoing, limits=limits, is_outgoing=True)
        self._ring = ends.outgoing_ring
        self.allotment = Allotment(ends.ring_bytes)

    def _bring_on(self, transfer: OrderedTransfer, stream: CurrentStream | None) -> bool:
        while True:
            nbytes = min(self._limits.chunk_bytes, transfer.nbytes - transfer.offset)
            placed = self.allotment.take(nbytes, retired=self._direction.retired)
            if placed is None:
                return False
            self._put(transfer, stream, nbytes, placed)
            transfer.offset += nbytes
            if transfer.offset == transfer.nbytes:
                return True

    def _put(
        self,
        transfer: OrderedTransfer,
        stream: CurrentStream | None,
        nbytes: int,
        placed: tuple[int, int],
    ) -> None:
        place, freed = placed
        self._awaited = freed & COUNTER_MASK
        must_wait = ahead(self.awaited, self._direction.consumed) > 0
        # A caller's stream, which trains, is not held up until the peer has made room.
        if not must_wait and stream is not None and self._fits(transfer, stream):
            self._put_with_caller(transfer, stream, place)
        else:
            after = Word(self._direction.consumed_word, self.awaited) if must_wait else None
            self._put_aside(transfer, place, nbytes, after=after)
        self._direction.post(
            transfer.header, offset=transfer.offset, nbytes=nbytes, place=place, count=self.count
        )

    def _put_with_caller(
        self, transfer: OrderedTransfer, stream: CurrentStream, place: int
    ) -> None:
        self._last_caller = stream.key
        self._count += 1
        target = self._ring + place
        stream.move(
            target, transfer.address, transfer.nbytes, after=None, then=self._done.word(self.count)
        )

    def _put_aside(
        self, transfer: OrderedTransfer, place: int, nbytes: int, *, after: Word | None
    ) -> None:
        self._take_link_stream()
        self._begin(transfer)
        aside = nbytes < transfer.nbytes or not self._is_settled()
        self._count += 1
        self.stream.move(
            self._ring + place,
            transfer.address + transfer.offset,
            nbytes,
            after=after,
            then=self._done.word(self.count),
            aside=aside,
        )


class PythonIncoming(_PythonFlow):
    """What this end receives."""

    def __init__(self, device: OrderedDevice, ends: OrderedEnds, *, limits: Limits) -> None:
        super().__init__(device, ends, ends.incoming, limits=limits, is_outgoing=False)
        self._ring, self._ring_bytes = ends.incoming_ring, ends.ring_bytes

    def _bring_on(self, transfer: OrderedTransfer, stream: CurrentStream | None) -> bool:
        while ahead(self._direction.posted, self.count) > 0:
            entry = self._direction.entry(self.count)
            self._verify(entry, transfer)
            is_whole = entry.nbytes == transfer.nbytes
            if is_whole and stream is not None and self._fits(transfer, stream):
                self._take_with_caller(transfer, stream, entry)
            else:
                self._take_aside(transfer, entry)
            self._direction.retire(self.count)
            transfer.offset += entry.nbytes
            if transfer.offset == transfer.nbytes:
                return True
        return False

    def _take_with_caller(
        self, transfer: OrderedTransfer, stream: CurrentStream, entry: Entry
    ) -> None:
        self._last_caller = stream.key
        self._count += 1
        stream.move(
            transfer.address,
            self._ring + entry.place,
            entry.nbytes,
            after=self._arrival(),
            then=self._done.word(self.count),
        )

    def _take_aside(self, transfer: OrderedTransfer, entry: Entry) -> None:
        self._take_link_stream()
        self._begin(transfer)
        aside = entry.nbytes < transfer.nbytes or not self._is_settled()
        self._count += 1
        self.stream.move(
            transfer.address + transfer.offset,
            self._ring + entry.place,
            entry.nbytes,
            after=self._arrival(),
            then=self._done.word(self.count),
            aside=aside,
        )

    def _arrival(self) -> Word | None:
        """What to wait for before the bytes of the last entry are there; None if they are."""
        self._awaited = self.count & COUNTER_MASK
        if ahead(self.awaited, self._direction.produced) <= 0:
            return None
        return Word(self._direction.produced_word, self.awaited)

    def _verify(self, entry: Entry, transfer: OrderedTransfer) -> None:
        if (
            entry.header != transfer.header
            or entry.offset != transfer.offset
            or entry.nbytes > transfer.nbytes - transfer.offset
            or entry.place + entry.nbytes > self._ring_bytes
        ):
            raise EntryRefused(refusal(entry, transfer))
