"""Entries of an ordered link enqueued by C (hetero/native/flow.c), for GPUs.

It does what python_flows.py does, entry by entry, in one call for a message: Python spends more on
an entry than the GPU's driver and, for a message of a few MiB, than the GPU itself.
"""

from __future__ import annotations

from ctypes import addressof, byref, c_uint64

from hetero.device.ordered import CurrentStream, NativeStreams, OrderedDevice
from hetero.link.flow_base import EntryRefused, Flow, Limits, refusal
from hetero.link.header import HEADER_BYTES
from hetero.link.ring import ALIGNMENT, ENTRIES, RECORD_BYTES, Direction
from hetero.link.ring_transfer import OrderedEnds, OrderedTransfer
from hetero.native import library as native
from hetero.native.library import Progress


class NativeFlow(Flow):
    """One direction of one end."""

    def __init__(
        self,
        device: OrderedDevice,
        ends: OrderedEnds,
        direction: Direction,
        *,
        streams: NativeStreams,
        limits: Limits,
        is_outgoing: bool,
    ) -> None:
        super().__init__(device, ends, direction, limits=limits, is_outgoing=is_outgoing)
        self._streams = streams
        self._room = (c_uint64 * ENTRIES)()
        words = direction.host_addresses()
        self._state = native.Flow(
            streams=streams.streams,
            posted=words.posted,
            retired=words.retired,
            produced=words.produced,
            consumed=words.consumed,
            records=words.records,
            produced_word=direction.produced_word,
            consumed_word=direction.consumed_word,
            ring=ends.outgoing_ring if is_outgoing else ends.incoming_ring,
            ring_bytes=ends.ring_bytes,
            chunk_bytes=limits.chunk_bytes,
            small_bytes=limits.small_bytes,
            entries=ENTRIES,
            header_bytes=HEADER_BYTES,
            record_bytes=RECORD_BYTES,
            alignment=ALIGNMENT,
            checksum_bytes=device.checksum_bytes,
            ends=addressof(self._room),
            doorbell=ends.theirs.doorbell_address(),
            is_outgoing=is_outgoing,
        )
        self._leaves_ringing = not self._state.doorbell
        self._reference = byref(self._state)
        self._call = streams.library.native_bring_on

    @property
    def count(self) -> int:
        return int(self._state.count)

    @property
    def awaited(self) -> int:
        return int(self._state.awaited)

    def broken(self) -> str | None:
        return self._streams.broken()

    def _caller(self) -> int | None:
        state = self._state
        return state.caller if state.by_caller else None

    def _bring_on(self, transfer: OrderedTransfer, stream: CurrentStream | None) -> bool:
        is_callers_turn = (
            stream is not None and stream.key == transfer.caller and stream.is_at_home()
        )
        # Before the call, in case an exception of a signal's handler hides what it returns.
        transfer.begun = True
        progress = self._give(transfer, is_callers_turn=is_callers_turn)
        if progress == Progress.UNMARKED:
            transfer.ready = self._device.mark()
            progress = self._give(transfer, is_callers_turn=False)
        if progress == Progress.WHOLE:
            return True
        transfer.offset = self._state.offset
        transfer.begun = transfer.offset > 0 or progress == Progress.FAILED
        if progress == Progress.FAILED:
            purpose = f"carry message {transfer.sequence}"
            raise self._streams.failure(self._state.failed, purpose)
        if progress == Progress.REFUSED:
            raise EntryRefused(refusal(self._direction.entry(self.count), transfer))
        return False

    def _give(self, transfer: OrderedTransfer, *, is_callers_turn: bool) -> int:
        ready = transfer.ready
        progress: int = self._call(
            self._reference,
            transfer.header,
            transfer.address,
            transfer.nbytes,
            transfer.offset,
            0 if ready is None else self._streams.event_of(ready),
            ready is not None,
            transfer.caller,
            is_callers_turn,
        )
        return progress


def make_flows(device: OrderedDevice, ends: OrderedEnds, *, limits: Limits) -> tuple[Flow, Flow]:
    """What an end sends and what it receives."""
    outgoing, incoming = (
        NativeFlow(
            device,
            ends,
            direction,
            streams=device.native_streams(),
            limits=limits,
            is_outgoing=is_outgoing,
        )
        for direction, is_outgoing in ((ends.outgoing, True), (ends.incoming, False))
    )
    return outgoing, incoming
