"""Sends and receives over several links in one call into C, as a collective does.

Between two GPUs a small message takes less time than Python needs to enqueue it. So a message for
which nothing is left to do once C has returned gets no handle.
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

_NEW = struct.Struct("<4QII2QII")
_STARTED = struct.Struct(f"{_NEW.format}{ExchangePart.header.size}s")
_SIZE = ctypes.sizeof(ExchangePart)
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
        self._capacity = 0
        self._reserve(2)

    def _reserve(self, count: int) -> None:
        """Have room for so many parts."""
        if count > self._capacity:
            self._capacity = count
            self._parts = (ExchangePart * count)()
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
            self._fill_started(works)
            is_over = False
            try:
                is_over = self._exchange(len(works), locked, stream, microseconds)
            finally:
                self._note(works)
                self._end(locked, caller_waits=True)
            if is_over:
                for work in works:
                    work.tensor = None
            return is_over
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
                self._fill_new(messages, tag)
                is_over, works = False, []
                try:
                    is_over = self._exchange(
                        len(messages), locked, stream, microseconds, caller_waits=caller_waits
                    )
                finally:
                    # Also where a signal handler's exception hides what C has done.
                    if not (is_over and caller_waits):
                        works = self._add_transfers(messages, stream)
                    self._end(locked, caller_waits=caller_waits)
                return works
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

    def _fill_new(self, messages: Sequence[Any], tag: int) -> None:
        """Describe messages to C, which numbers them and makes their headers."""
        self._reserve(len(messages))
        parts, place = self._parts, 0
        for link, tensor, first, nbytes, is_receive in messages:
            flow = link.flow_for(tensor, nbytes, is_receive=is_receive)
            address = tensor.data_ptr() + first
            _NEW.pack_into(parts, place, flow.address, address, nbytes, 0, tag, 0, 0, 0, 0, 0)
            place += _SIZE

    def _fill_started(self, works: Sequence[RingTransfer]) -> None:
        self._reserve(len(works))
        for place, work in enumerate(works):
            _STARTED.pack_into(
                self._parts,
                place * _SIZE,
                work.flow.address,
                work.address,
                work.nbytes,
                0 if work.ready is None else work.ready.handle,
                0,
                True,
                work.offset,
                work.end_count or 0,
                0 if work.end_count is None else _ENQUEUED,
                work.is_on_caller_stream,
                work.header,
            )

    def _exchange(
        self,
        count: int,
        links: Sequence[RingLink],
        stream: CurrentStream,
        microseconds: int,
        *,
        caller_waits: bool = True,
    ) -> bool:
        """With the locks; whether all is enqueued, and waited for if `caller_waits`."""
        progress = self._call(self._address, count, stream.key, microseconds, caller_waits)
        for link in links:
            if link.peer_has_failed:
                return False
        return bool(progress == _ENQUEUED)

    def _add_transfers(self, messages: Sequence[Any], stream: CurrentStream) -> list[RingTransfer]:
        """Make the handles of messages that C has begun."""
        works = [
            message[0].add_transfer(message, part, stream)
            for message, part in zip(messages, self._parts, strict=False)
        ]
        self._note(works)
        return works

    def _note(self, works: Sequence[RingTransfer]) -> None:
        """Store in the transfers what C has done. First for all, then handle failures."""
        failed = []
        for work, part in zip(works, self._parts, strict=False):
            work.flow.note_exchange(work, part)
            if part.progress == Progress.FAILED:
                failed.append(work)
        for work in failed:
            work.link.handle_driver_failure(work)

    @staticmethod
    def _end(links: Sequence[RingLink], *, caller_waits: bool) -> None:
        for link in links:
            link.end_exchange(caller_waits=caller_waits)
