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

_PART = struct.Struct(f"<5QII{ExchangePart.header.size}s")
_PROGRESS = struct.Struct("<QQII")
_SIZE = ctypes.sizeof(ExchangePart)
_PROGRESS_OFFSET = ExchangePart.offset.offset
_ENQUEUED = int(Progress.ENQUEUED)
_PROGRESS_AT_FIRST = (0, 0, 0, 0)


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
        for each message. It holds the locks of all links meanwhile, so keep it short, and takes
        them in the order of the peers, so that two callers cannot deadlock.
        """
        links: Collection[Link] = dict.fromkeys([message[0] for message in messages])
        if len(links) > 1:
            links = sorted(links, key=lambda link: link.description.peer)
        # Ring links alone implement the rest of this protocol.
        locked: list[Any] = []
        try:
            for link in links:
                stream = link.lock_for_exchange()
                if stream is None:
                    break
                locked.append(link)
                if not link.c_rings_doorbell:
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
        if len(messages) > self._capacity:
            self._reserve(len(messages))
        parts, transfers, place = self._parts, [], 0
        for link, tensor, first, nbytes, is_receive in messages:
            transfer = link.prepare_transfer(
                tensor, (first, nbytes), stream, tag=tag, is_receive=is_receive
            )
            _PART.pack_into(
                parts,
                place,
                transfer.flow.address,
                transfer.address,
                transfer.nbytes,
                *_PROGRESS_AT_FIRST,
                transfer.header,
            )
            transfers.append(transfer)
            place += _SIZE
        progress = self._call(self._address, len(transfers), stream.key, microseconds)
        place = _PROGRESS_OFFSET
        failed = []
        for transfer in transfers:
            offset, count, of_part, on_caller_stream = _PROGRESS.unpack_from(parts, place)
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
            transfer.link.handle_driver_failure(transfer)
        is_over = progress == _ENQUEUED
        for link in links:
            is_over = link.end_exchange(caller_waits=microseconds > 0) and is_over
        return [] if is_over else transfers
