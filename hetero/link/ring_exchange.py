"""Sends and receives over several links in one call into C, as a collective does.

Between two GPUs a small message takes less time than Python needs to enqueue it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Collection, Sequence
from typing import Any

import torch

from hetero.device.device import CurrentStream
from hetero.link.base import Link, Work, as_bytes
from hetero.link.ring_link import RingLink
from hetero.link.ring_transfer import RingTransfer
from hetero.native.binding import native
from hetero.native.structures import ExchangePart, Progress

_PART = struct.Struct(f"<6QII{ExchangePart.header.size}s")
_PROGRESS = struct.Struct("<QQII")
_SIZE = ctypes.sizeof(ExchangePart)
_PROGRESS_OFFSET = ExchangePart.offset.offset
_ENQUEUED = int(Progress.ENQUEUED)


Message = tuple[Link, torch.Tensor, int, int, bool]
"""A link, a contiguous tensor, an offset and a size in bytes, and whether to receive.

A plain tuple, because a dataclass, or a view of these bytes, costs more than all the rest here. The
tensor must keep its memory meanwhile.
"""


def begin(message: Message, *, tag: int) -> Work:
    """Send or receive one message by itself."""
    link, tensor, first, nbytes, is_receive = message
    piece = as_bytes(tensor)[first : first + nbytes]
    return link.recv(piece, tag=tag) if is_receive else link.send(piece, tag=tag)


class RingExchange:
    """Enqueues messages for one thread at a time; keeps the array of parts for C."""

    def __init__(self) -> None:
        self._call = native().native_exchange
        self._reserve(2)

    def _reserve(self, count: int) -> None:
        self._capacity = count
        self._parts = ctypes.create_string_buffer(count * _SIZE)
        self._address = ctypes.addressof(self._parts)

    def order(self, messages: Sequence[Message], *, tag: int, microseconds: int) -> Sequence[Work]:
        """Enqueue the messages and make the caller's stream wait for them.

        Polls the peers for `microseconds`. Returns nothing if all could be enqueued, else a Work
        for each message.
        """
        return self._begin(messages, tag, microseconds, caller_waits=True)

    def start(self, messages: Sequence[Message], *, tag: int) -> Sequence[Work]:
        """Enqueue what no peer has to come for first; returns a Work for each message."""
        return self._begin(messages, tag, 0, caller_waits=False)

    def progress(self, works: Sequence[Any], *, microseconds: int) -> bool:
        """Go on with what `start` or `order` has returned, as `order`; whether nothing is left.

        If not, wait for each.
        """
        locked: list[RingLink] = []
        try:
            stream = self._lock({work.link: None for work in works}, locked, works)
            if stream is None or any(work.caller_stream != stream.key for work in works):
                return False
            return self._exchange(works, locked, stream, microseconds, caller_waits=True)
        finally:
            for link in locked:
                link.unlock()

    def _begin(
        self, messages: Sequence[Any], tag: int, microseconds: int, *, caller_waits: bool
    ) -> Sequence[Work]:
        links = dict.fromkeys([message[0] for message in messages])
        locked: list[RingLink] = []
        try:
            if (stream := self._lock(links, locked, None)) is not None:
                transfers = [
                    message[0].prepare_transfer(message, stream, tag=tag) for message in messages
                ]
                is_over = self._exchange(
                    transfers, locked, stream, microseconds, caller_waits=caller_waits
                )
                return [] if is_over and caller_waits else transfers
        finally:
            for link in locked:
                link.unlock()
        return [begin(message, tag=tag) for message in messages]

    @staticmethod
    def _lock(
        links: Collection[Any], locked: list[RingLink], started: Sequence[RingTransfer] | None
    ) -> CurrentStream | None:
        """Lock all links, and list them in `locked`; None if one cannot take part.

        In the order of the peers, so that two callers cannot deadlock. Hold the locks briefly.
        """
        if len(links) > 1:
            links = sorted(links, key=lambda link: link.description.peer)
        stream = None
        for link in links:
            if not isinstance(link, RingLink) or not (stream := link.lock_for_exchange(started)):
                return None
            locked.append(link)
        return stream

    def _exchange(
        self,
        transfers: Sequence[RingTransfer],
        links: Sequence[RingLink],
        stream: CurrentStream,
        microseconds: int,
        *,
        caller_waits: bool,
    ) -> bool:
        """With the locks; whether all is enqueued and, if `caller_waits`, the stream waits for it.

        Does not poll for links whose doorbell C cannot ring.
        """
        for link in links:
            if not link.c_rings_doorbell:
                microseconds = 0
        if len(transfers) > self._capacity:
            self._reserve(len(transfers))
        parts, place = self._parts, 0
        for transfer in transfers:
            # Set it before the call: a signal handler may raise before the result is stored.
            transfer.has_begun = True
            _PART.pack_into(
                parts,
                place,
                transfer.flow.address,
                transfer.address,
                transfer.nbytes,
                0 if transfer.ready is None else transfer.ready.handle,
                transfer.offset,
                transfer.end_count or 0,
                0 if transfer.end_count is None else _ENQUEUED,
                transfer.is_on_caller_stream,
                transfer.header,
            )
            place += _SIZE
        progress = self._call(self._address, len(transfers), stream.key, microseconds, caller_waits)
        self._note(transfers)
        is_over = progress == _ENQUEUED
        for link in links:
            is_over = link.end_exchange(caller_waits=microseconds > 0) and is_over
        if is_over and caller_waits:
            for transfer in transfers:
                transfer.tensor = None
        return is_over

    def _note(self, transfers: Sequence[RingTransfer]) -> None:
        """Store in the transfers what C has done. First for all, then handle failures."""
        place, failed, unpack, parts = _PROGRESS_OFFSET, [], _PROGRESS.unpack_from, self._parts
        for transfer in transfers:
            offset, count, of_part, on_caller_stream = unpack(parts, place)
            place += _SIZE
            if transfer.end_count is None:
                if of_part == _ENQUEUED:
                    transfer.flow.note_enqueued(count, on_caller_stream=on_caller_stream)
                    continue
                has_begun = offset > 0 or of_part == Progress.FAILED
                transfer.flow.note_partial(transfer, offset, has_begun=has_begun)
            if of_part == Progress.FAILED:
                failed.append(transfer)
        for transfer in failed:
            transfer.link.handle_driver_failure(transfer)
