"""One direction of a ring link's end: its messages, and the streams that carry them.

One call into C (hetero/native/flow.c) enqueues as many chunks of a message as there is room for.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from ctypes import addressof
from typing import TYPE_CHECKING

import torch

from hetero.device.device import CurrentStream, Word
from hetero.errors import LinkError
from hetero.link.header import Header, difference, unnumbered_header
from hetero.link.ring import COUNTER_MASK, HALF_RANGE, RingEnds, RingOptions, ahead
from hetero.native import binding
from hetero.native.binding import MessageHeader, Progress, acquire_fence, native
from hetero.observe.record import copied

if TYPE_CHECKING:
    from hetero.link.ring_link import RingTransfer

_SMALL_BYTES = 256 << 10
"""The largest message for the caller's stream: through pinned host memory it takes 5 us there."""
_SMALL_BYTES_OF_DEVICE = 1 << 20
"""The largest such message if the rings are in device memory: 4 us from one H200 to another."""
_ENQUEUED, _REFUSED, _FAILED = map(int, list(Progress)[1:])


class UnexpectedEntry(Exception):
    """The peer has sent another message than the one to be received; says what differs."""


class Flow:
    """One direction of one end. Call it with the link's lock."""

    def __init__(self, options: RingOptions, ends: RingEnds, *, is_outgoing: bool) -> None:
        device = options.device
        self.waiting: deque[RingTransfer] = deque()
        self.in_flight: deque[RingTransfer] = deque()
        self.aborted: list[RingTransfer] = []
        """Kept after a failure: streams may still copy from and to their tensors."""
        self._moved: tuple[int, int, int] | None = None
        self._moved_at = 0.0
        self.device = device
        is_in_device = options.transport == "ipc"
        small_bytes = _SMALL_BYTES_OF_DEVICE if is_in_device else _SMALL_BYTES
        self._small_bytes = min(small_bytes, options.entry_bytes)
        self._direction = direction = ends.outgoing if is_outgoing else ends.incoming
        self._peer = ends.peer
        self._streams = device.new_streams(copy_bytes=options.entry_bytes)
        wake_peer, wake_argument = ends.peer.wake
        self._state = binding.Flow(
            streams=self._streams.streams,
            direction=direction.address,
            produced_word=direction.produced_word,
            consumed_word=direction.consumed_word,
            ring=ends.outgoing_ring if is_outgoing else ends.incoming_ring,
            ring_bytes=options.ring_bytes,
            chunk_bytes=options.entry_bytes,
            least_chunk_bytes=options.least_entry_bytes,
            small_bytes=self._small_bytes,
            checksum_bytes=device.checksum_bytes,
            user_buffers=direction.user_buffers_address if options.zero_copy else 0,
            wake_peer=ctypes.cast(wake_peer, ctypes.c_void_p).value,
            wake_argument=wake_argument,
            doorbell=ends.local.doorbell_address,
            is_outgoing=is_outgoing,
        )
        empty = unnumbered_header(torch.uint8, (0,))
        self._state.bytes_header = MessageHeader.from_buffer_copy(empty)
        self.address = addressof(self._state)
        """Address of the state, for messages."""
        library = native()
        library.native_init_flow(self.address)
        self._call, self._begin = library.native_progress, library.native_begin
        self._abort = library.native_abort
        self.acquire = acquire_fence()

    @property
    def count(self) -> int:
        """Entries enqueued."""
        return int(self._state.count)

    def number_from_0(self) -> None:
        """Call it while no message is under way."""
        self._state.sequence = 0

    def is_idle(self) -> bool:
        """Returns whether every message is complete."""
        return not (self.waiting or self.in_flight or self._entries_left())

    def _entries_left(self) -> int:
        """The number of entries enqueued by this end's CPU and not completed by its device."""
        enqueued, completed = self._counters()
        return ahead(enqueued, completed)

    def _counters(self) -> tuple[int, int]:
        """Returns (enqueued, completed): the entry counts of this end's CPU and of its device."""
        direction = self._direction
        if self._state.is_outgoing:
            return direction.posted, direction.produced
        return direction.retired, direction.consumed

    def first_header(self) -> bytes | None:
        """The header of the first message that is not complete; None if all are."""
        if self.in_flight:
            return self.in_flight[0].header
        if self._entries_left():
            _, completed = self._counters()
            return bytes(self._direction.record(completed).header)
        return self.waiting[0].header if self.waiting else None

    def waits_for_peer(self) -> bool:
        """Returns whether an entry depends on a value that the peer's counter has not reached."""
        direction = self._direction
        counter = direction.consumed if self._state.is_outgoing else direction.produced
        return ahead(self._state.awaited, counter) > 0

    def is_overdue(self, timeout: float) -> bool:
        """Returns whether a message is older than the timeout and nothing has moved for as long."""
        now, direction = time.monotonic(), self._direction
        moved = self.count, direction.produced, direction.consumed
        if moved != self._moved:
            self._moved, self._moved_at = moved, now
        if now <= self._moved_at + timeout:
            return False
        return self._entries_left() > 0 or any(
            now > transfer.begun_at + timeout and not transfer.is_completed()
            for transfer in self.transfers()
        )

    def unblock(self) -> None:
        """Unblock streams that wait for the peer's counter, after setting the error flag.

        Where this end's own have failed, they write no counter any more: unblock who waits for it.
        """
        is_outgoing = self._state.is_outgoing
        self._direction.unblock(self._state.awaited, sender=is_outgoing)
        if self.stream_error():
            self._direction.unblock(self.count, sender=not is_outgoing)

    def stream_error(self) -> str | None:
        """The error of the streams; None if they have not failed."""
        return self._streams.broken()

    def completed_word(self, count: int, *, consumed: bool) -> Word:
        """Returns the word, with its value, that says `count` entries are consumed or produced."""
        direction = self._direction
        address = direction.consumed_word if consumed else direction.produced_word
        return Word(address, count & COUNTER_MASK)

    def has_completed(self, count: int, *, consumed: bool) -> bool:
        """Returns whether the receiver's, or the sender's, device has completed `count` entries.

        Ignore the counter once the peer has failed: it then writes it to unblock its own device.
        """
        completed = self._direction.consumed if consumed else self._direction.produced
        if (completed - count) & COUNTER_MASK >= HALF_RANGE:  # `ahead` costs a call a poll
            return False
        self.acquire()
        return not self._peer.has_failed

    def transfers(self) -> list[RingTransfer]:
        return [*self.in_flight, *self.waiting]

    def pending(self) -> list[RingTransfer]:
        """The transfers that are not complete. Needs no lock, and requests no progress."""
        return [
            transfer
            for transfer in (*copied(self.in_flight), *copied(self.waiting))
            if (end := transfer.end_count) is None
            or not self.has_completed(end, consumed=transfer.state.completes_at_receiver)
        ]

    def release_completed(self) -> None:
        """Release the tensors of completed transfers."""
        while self.in_flight and self.in_flight[0].is_completed():
            self.in_flight.popleft()

    def abort(self) -> None:
        """Forget all messages, which no thread then uses any more."""
        self._abort(self.address)
        self.aborted += self.in_flight
        self.aborted += (transfer for transfer in self.waiting if transfer.has_begun)
        self.in_flight.clear()
        self.waiting.clear()

    def is_small(self, nbytes: int) -> bool:
        """Returns whether a message may go to the caller's stream."""
        return nbytes <= self._small_bytes

    def begin(self, transfer: RingTransfer) -> None:
        """Queue a message. Its bytes may come from then on."""
        # First keep its memory, whatever exception a signal's handler raises behind the call.
        self.waiting.append(transfer)
        self._begin(addressof(transfer.state))

    def enqueue(
        self, stream: CurrentStream | None = None, *, awaited: RingTransfer | None = None
    ) -> None:
        """Enqueue as much as possible.

        `stream` is the caller's, during `send` or `awaited.wait`. Raises UnexpectedEntry.
        """
        while (transfer := self.take_enqueued()) is not None:
            # Never let a message after the awaited one block the caller's stream.
            if awaited is not None and awaited.end_count is not None:
                stream = None
            by_caller = (
                stream is not None
                and stream.key == transfer.state.caller_stream
                and stream.is_current_device()
            )
            progress = self._call(addressof(transfer.state), by_caller)
            if progress == _FAILED:
                raise self.driver_error(transfer)
            if progress == _REFUSED:
                raise UnexpectedEntry(self._mismatch(transfer))
            if progress != _ENQUEUED:
                return

    def take_enqueued(self) -> RingTransfer | None:
        """Move messages that C has enqueued to `in_flight`; returns the first that still waits."""
        while self.waiting:
            transfer = self.waiting[0]
            if transfer.state.progress != _ENQUEUED:
                return transfer
            self.in_flight.append(self.waiting.popleft())
        return None

    def driver_error(self, transfer: RingTransfer) -> LinkError:
        """The driver's last failure."""
        number = Header.unpack(transfer.header).sequence
        return self._streams.failure(self._state.failed, f"carry message {number}")

    def _mismatch(self, transfer: RingTransfer) -> str:
        """How the next entry differs from the one that the transfer expects."""
        entry, offset = self._direction.record(self.count), transfer.state.offset
        left = transfer.state.nbytes - offset
        return difference(bytes(entry.header), transfer.header) or (
            f"a part of {entry.nbytes} bytes at {entry.offset}, slot {entry.slot}, where {left} "
            f"bytes at {offset} are missing"
        )
