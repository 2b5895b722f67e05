"""One direction of one end of a link: what is to be enqueued, and what is on its way.

One call of C (hetero/native/flow.c) puts all of a message into streams that can be put there:
Python spends more on an entry than a GPU's driver and, for a few MiB, than the GPU itself.

Large messages go through streams of the link, so that the caller's own work goes on beside them. A
small one goes into the caller's stream where the order allows it: for a few bytes the events that
join two streams cost more than the copy.
"""

from __future__ import annotations

from collections import deque
from ctypes import addressof, byref

from hetero.device.device import CurrentStream, Device, Word
from hetero.errors import LinkError
from hetero.link.header import Header
from hetero.link.ring import COUNTER_MASK, HALF_ROUND, Entry
from hetero.link.ring_transfer import RingEnds, RingTransfer
from hetero.native import structures
from hetero.native.binding import native
from hetero.native.structures import Progress

SMALL_BYTES = 256 << 10
"""Up to this a message may go through the caller's stream: through pinned host memory it holds that
up for 5 us."""
SMALL_BYTES_OF_DEVICE = 1 << 20
"""The same where the data lie in device memory: 4 us from one H200 to another."""


class EntryRefused(Exception):
    """The peer has sent something else than what is to be received; says what differs."""


class Flow:
    """One direction of one end. Called with the link's lock."""

    def __init__(
        self,
        device: Device,
        ends: RingEnds,
        *,
        chunk_bytes: int,
        small_bytes: int,
        is_outgoing: bool,
    ) -> None:
        """Parts have `chunk_bytes` at most, messages for the caller's stream `small_bytes`."""
        self.waiting: deque[RingTransfer] = deque()
        self.in_flight: deque[RingTransfer] = deque()
        self.aborted: list[RingTransfer] = []
        """Of a link that has failed: streams may still copy to and from their tensors."""
        self.sequence = 0
        self.device = device
        self._small_bytes = small_bytes
        self._direction = direction = ends.outgoing if is_outgoing else ends.incoming
        self._peer = ends.theirs
        self._streams = device.new_streams()
        self._state = structures.Flow(
            streams=self._streams.streams,
            direction=direction.address,
            produced_word=direction.produced_word,
            consumed_word=direction.consumed_word,
            ring=ends.outgoing_ring if is_outgoing else ends.incoming_ring,
            ring_bytes=ends.ring_bytes,
            chunk_bytes=chunk_bytes,
            small_bytes=small_bytes,
            checksum_bytes=device.checksum_bytes,
            user_buffers=direction.user_buffers_address if ends.zero_copy else 0,
            doorbell=ends.theirs.doorbell_address(),
            is_outgoing=is_outgoing,
        )
        self._does_zero_copy = self._state.user_buffers != 0
        self._reference = byref(self._state)
        self.address = addressof(self._state)
        """Where C has it."""
        self.rings_peer = self._state.doorbell != 0
        """Whether C does, when it has enqueued something."""
        self._call = native().native_progress

    @property
    def count(self) -> int:
        """Entries enqueued."""
        return int(self._state.count)

    @property
    def awaited(self) -> int:
        """The last counter value of the peer's that an entry needs."""
        return int(self._state.awaited)

    def broken(self) -> str | None:
        """Why the streams have stopped by themselves; None while they have not."""
        return self._streams.broken()

    def completed_word(self, count: int, *, consumed: bool) -> Word:
        """What the receiver's device, or the sender's, writes when done with so many entries."""
        direction = self._direction
        address = direction.consumed_word if consumed else direction.produced_word
        return Word(address, count & COUNTER_MASK)

    def has_completed(self, count: int, *, consumed: bool) -> bool:
        """Whether the receiver's device, or the sender's, is done with so many entries.

        A peer that gives up says so and then writes the counter too, to release its own device.
        """
        completed = self._direction.consumed if consumed else self._direction.produced
        return (completed - count) & COUNTER_MASK < HALF_ROUND and not self._peer.has_failed

    def transfers(self) -> list[RingTransfer]:
        return [*self.in_flight, *self.waiting]

    def release_completed(self) -> None:
        """Let go of the tensors of transfers that have ended."""
        while self.in_flight and self.in_flight[0].is_completed():
            self.in_flight.popleft()

    def abort(self) -> None:
        self.aborted += self.in_flight
        self.aborted += (transfer for transfer in self.waiting if transfer.begun)
        self.in_flight.clear()
        self.waiting.clear()

    def is_small(self, nbytes: int) -> bool:
        """Whether a message is one for the caller's stream."""
        return nbytes <= self._small_bytes

    def enqueue(
        self, stream: CurrentStream | None = None, *, awaited: RingTransfer | None = None
    ) -> bool:
        """Put into streams all that can be; whether the peer is to be rung for it.

        `stream` is the caller's, in its call of `send` or of `awaited.wait`. Raises EntryRefused.
        """
        before, state = self.count, self._state
        while self.waiting:
            transfer = self.waiting[0]
            # What comes after the awaited one must not hold the caller's stream up.
            if awaited is not None and awaited.end is not None:
                stream = None
            if not self._progress_transfer(transfer, stream):
                break
            self.note_enqueued(state.count, on_caller_stream=state.on_caller_stream)
        return not self.rings_peer and self.count != before

    def note_enqueued(self, count: int, *, on_caller_stream: bool) -> None:
        """All of what waits first has been enqueued, as entries up to this one."""
        transfer = self.waiting.popleft()
        # The peer has to have what is sent out of a tensor: until then it may be sent again.
        zero_copy = self._does_zero_copy and transfer.nbytes > self._small_bytes
        transfer.ends_at_receiver = transfer.is_receive or zero_copy
        transfer.is_in_callers_stream = bool(on_caller_stream) and not zero_copy
        transfer.end = count
        self.in_flight.append(transfer)

    def _progress_transfer(self, transfer: RingTransfer, stream: CurrentStream | None) -> bool:
        """Put into streams what can be of one message; whether that is all of it."""
        may_use_caller_stream = (
            stream is not None and stream.key == transfer.caller and stream.is_current_device()
        )
        # Before the call, in case an exception of a signal's handler hides what it returns.
        transfer.begun = True
        progress = self._give(transfer, may_use_caller_stream=may_use_caller_stream)
        if progress == Progress.NEEDS_EVENT:
            transfer.ready = self.device.record_event()
            progress = self._give(transfer, may_use_caller_stream=False)
        if progress == Progress.ENQUEUED:
            return True
        transfer.offset = self._state.offset
        transfer.begun = transfer.offset > 0 or progress == Progress.FAILED
        if progress == Progress.FAILED:
            raise self.driver_failure(transfer)
        if progress == Progress.REFUSED:
            raise EntryRefused(refusal(self._direction.entry(self.count), transfer))
        return False

    def note_partial(self, transfer: RingTransfer, offset: int, *, has_begun: bool) -> None:
        """Of a message that its caller was sending or receiving, only so much has been enqueued."""
        transfer.offset, transfer.begun = offset, has_begun
        transfer.ready = self.device.record_event()

    def driver_failure(self, transfer: RingTransfer) -> LinkError:
        """What the driver refused last."""
        return self._streams.failure(self._state.failed, f"carry message {transfer.sequence}")

    def _give(self, transfer: RingTransfer, *, may_use_caller_stream: bool) -> int:
        ready = transfer.ready
        progress: int = self._call(
            self._reference,
            transfer.header,
            transfer.address,
            transfer.nbytes,
            transfer.offset,
            0 if ready is None else ready.handle,
            ready is not None,
            transfer.caller,
            may_use_caller_stream,
        )
        return progress


def refusal(entry: Entry, transfer: RingTransfer) -> str:
    """What of an entry is not as the transfer expects it."""
    try:
        difference = Header.unpack(entry.header).difference(Header.unpack(transfer.header))
    except ValueError as error:
        return str(error)
    left = transfer.nbytes - transfer.offset
    return difference or (
        f"a part of {entry.nbytes} bytes at {entry.offset}, slot {entry.slot}, where {left} bytes "
        f"at {transfer.offset} are missing"
    )
