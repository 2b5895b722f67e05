"""Messages of several links that go together: one call of C enqueues them all.

Between two GPUs a small message takes less time than Python does to ask for it, so whoever sends
and receives several at once, as a collective does, asks once.
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

_PART = struct.Struct(f"<5QII{ExchangePart.header.size}s")
_KEPT_BY_C = struct.Struct("<QQII")
_SIZE = ctypes.sizeof(ExchangePart)
_KEPT_OFFSET = ExchangePart.offset.offset
_ENQUEUED = int(Progress.ENQUEUED)
_NOTHING_YET = (0, 0, 0, 0)


Message = tuple[Link, torch.Tensor, int, int, bool]
"""Contiguous memory of which so many bytes from one on are sent, or received into, as bytes.

A tuple, and not a tensor of just these bytes, because either costs Python more than all else here.
The tensor is its caller's alone: nobody gives it other memory meanwhile.
"""


def begin(message: Message, *, tag: int) -> Work:
    """Give a message to its link by itself."""
    link, tensor, first, nbytes, is_receive = message
    piece = as_bytes(tensor)[first : first + nbytes]
    return link.recv(piece, tag=tag) if is_receive else link.send(piece, tag=tag)


class RingExchange:
    """Enqueues messages for one thread at a time; keeps the memory in which C is told of them."""

    def __init__(self) -> None:
        self._call = native().native_exchange
        self._make_room(2)

    def _make_room(self, count: int) -> None:
        self._room = count
        self._parts = ctypes.create_string_buffer(count * _SIZE)
        self._address = ctypes.addressof(self._parts)

    def order(self, messages: Sequence[Message], *, tag: int, microseconds: int) -> Sequence[Work]:
        """Have the caller's stream go on behind the messages, once all can be enqueued.

        Looks for so long whether the peers have come. Returns what is to be waited for if they have
        not: all of it; else nothing.

        Unlike `send` and `recv` it holds the locks of all links while it looks, of which there is
        therefore an end. Two callers with links in common get them in the same order.
        """
        links: Collection[Link] = dict.fromkeys([message[0] for message in messages])
        if len(links) > 1:
            links = sorted(links, key=lambda link: link.description.peer)
        # Those of a ring, for which alone there is more than this.
        locked: list[Any] = []
        try:
            for link in links:
                stream = link.lock_for_exchange()
                if stream is None:
                    break
                locked.append(link)
                if not link.is_rung_by_c:
                    microseconds = 0
            else:
                assert stream is not None
                return self._exchange(messages, locked, stream, tag, microseconds)
        finally:
            for link in locked:
                link.unlock()
        return [begin(message, tag=tag) for message in messages]

    def _exchange(
        self,
        messages: Sequence[Any],
        links: Sequence[RingLink],
        stream: CurrentStream,
        tag: int,
        microseconds: int,
    ) -> list[RingTransfer]:
        """With the locks."""
        if len(messages) > self._room:
            self._make_room(len(messages))
        parts, announced, place = self._parts, [], 0
        for link, tensor, first, nbytes, is_receive in messages:
            transfer = link.announce(
                tensor, (first, nbytes), stream, tag=tag, is_receive=is_receive
            )
            _PART.pack_into(
                parts,
                place,
                transfer.flow.address,
                transfer.address,
                transfer.nbytes,
                *_NOTHING_YET,
                transfer.header,
            )
            announced.append(transfer)
            place += _SIZE
        progress = self._call(self._address, len(announced), stream.key, microseconds)
        place = _KEPT_OFFSET
        failed = []
        for transfer in announced:
            offset, count, of_part, on_caller_stream = _KEPT_BY_C.unpack_from(parts, place)
            place += _SIZE
            if of_part == _ENQUEUED:
                transfer.flow.note_enqueued(count, on_caller_stream=on_caller_stream)
                continue
            transfer.flow.note_partial(
                transfer, offset, has_begun=offset > 0 or of_part == Progress.FAILED
            )
            if of_part == Progress.FAILED:
                failed.append(transfer)
        for transfer in failed:
            transfer.link.note_driver_failure(transfer)
        is_over = progress == _ENQUEUED
        for link in links:
            is_over = link.end_exchange(is_watched=microseconds > 0) and is_over
        return [] if is_over else announced
