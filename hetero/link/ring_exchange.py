"""Sends and receives over several links in one call into C, as a collective does.

Between two GPUs a small message takes less time than Python needs to enqueue it. So a message for
which nothing is left to do once C has returned gets no handle.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from hetero.device.device import CurrentStream
from hetero.link.base import Link, Work, as_bytes
from hetero.link.ring_link import BYTES_TRANSFER, NOTHING_DONE, RingLink, RingTransfer
from hetero.native.binding import HeaderState, Progress, Transfer, native

_SIZE = ctypes.sizeof(Transfer)
_ENQUEUED, _FAILED = int(Progress.ENQUEUED), int(Progress.FAILED)
_NEW_STATE = True, int(HeaderState.OF_BYTES), *NOTHING_DONE
"""What `struct transfer` has after the tag: it follows what the caller's stream was given."""


Message = tuple[Link, torch.Tensor, int, int, bool]
"""A link, a contiguous tensor on its device, an offset and a size in bytes, and whether to receive.

A plain tuple, because a dataclass, or a view of these bytes, costs more than all the rest here. The
tensor must keep its memory meanwhile.
"""


def begin(message: Message, *, tag: int) -> Work:
    """Send or receive one message by itself."""
    link, tensor, first, nbytes, is_receive = message
    piece = as_bytes(tensor)[first : first + nbytes]
    return link.recv(piece, tag=tag) if is_receive else link.send(piece, tag=tag)


class RingExchange:
    """Enqueues messages for one thread at a time; keeps the memory in which it tells C of them."""

    def __init__(self) -> None:
        self._call = native().native_exchange
        self._reserve(2)

    def _reserve(self, count: int) -> None:
        """Allocate the descriptions of `count` messages; handles keep those given to them."""
        self._capacity = count
        self._new = (Transfer * count)()
        self._addresses = _addresses(self._new)

    def order(
        self,
        messages: Sequence[Message],
        *,
        tag: int,
        microseconds: int,
        waited: int | None = None,
    ) -> Sequence[Work]:
        """Enqueue the messages and make the caller's stream wait for the first `waited` of them.

        Polls the peers for `microseconds`. Returns a Work for each message that is left to wait
        for: for those after the first `waited` (None: all) if all could be enqueued, else for each.
        """
        waited = len(messages) if waited is None else waited
        return self._begin(messages, tag, microseconds, waited=waited)

    def start(self, messages: Sequence[Message], *, tag: int) -> Sequence[Work]:
        """Enqueue what no peer has to come for first; returns a Work for each message."""
        return self._begin(messages, tag, 0, waited=0)

    def progress(self, works: Sequence[Any], *, microseconds: int) -> bool:
        """Continue what `start` or `order` has returned, as `order` does.

        Returns whether nothing is left to wait for; if not, wait for each.
        """
        locked: list[RingLink] = []
        try:
            stream = self._lock({work.link: None for work in works}, locked)
            if stream is None or any(work.state.caller_stream != stream.key for work in works):
                return False
            addresses = _addresses(work.state for work in works)
            is_over = False
            try:
                count = len(works)
                is_over = self._exchange(addresses, count, locked, microseconds, waited=count)
            finally:
                self._end(locked, works, caller_waits=True)
            if is_over:
                for work in works:
                    work.tensor = None
            return is_over
        finally:
            for link in locked:
                link.unlock()

    def _begin(
        self, messages: Sequence[Any], tag: int, microseconds: int, *, waited: int
    ) -> Sequence[Work]:
        links = dict.fromkeys([message[0] for message in messages])
        locked: list[RingLink] = []
        begun: Any = None
        try:
            if (stream := self._lock(links, locked)) is not None:
                self._fill(messages, tag, stream.key)
                begun = self._new
                count, is_over, works = len(messages), False, []
                try:
                    is_over = self._exchange(
                        self._addresses, count, locked, microseconds, waited=waited
                    )
                finally:
                    # Also where a signal handler's exception hides what C has done.
                    first = waited if is_over else 0
                    if first < count:
                        works = self._add_transfers(messages, first)
                    self._end(locked, works, caller_waits=waited > 0)
                return works
        except BaseException:
            # A signal handler's may have come before all that C has queued got handles, which keep
            # the memory: that goes with the process then.
            if begun is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object((messages, begun)))
                self._reserve(self._capacity)
            raise
        finally:
            for link in locked:
                link.unlock()
        return [begin(message, tag=tag) for message in messages]

    @staticmethod
    def _lock(links: Collection[Any], locked: list[RingLink]) -> CurrentStream | None:
        """Lock all links, and list them in `locked`; None if one cannot take part.

        In the order of the peers, so that two callers cannot deadlock. Hold the locks briefly.
        """
        if len(links) > 1:
            links = sorted(links, key=lambda link: link.description.peer)
        stream = None
        for link in links:
            if not isinstance(link, RingLink) or not (stream := link.lock_for_exchange()):
                return None
            locked.append(link)
        return stream

    def _fill(self, messages: Sequence[Any], tag: int, caller_stream: int) -> None:
        """Describe messages to C, which makes their headers."""
        if len(messages) > self._capacity:
            self._reserve(len(messages))
        new, place, pack = self._new, 0, BYTES_TRANSFER.pack_into
        for link, tensor, first, nbytes, is_receive in messages:
            flow = link.count_message(nbytes, is_receive=is_receive).address
            address = tensor.data_ptr() + first
            pack(new, place, flow, address, nbytes, caller_stream, 0, tag, *_NEW_STATE)
            place += _SIZE

    def _exchange(
        self,
        addresses: Any,
        count: int,
        links: Sequence[RingLink],
        microseconds: int,
        *,
        waited: int,
    ) -> bool:
        """Enqueue messages of locked links.

        Returns whether all are enqueued and the stream waits for the first `waited`.
        """
        progress = self._call(addresses, count, microseconds, waited)
        for link in links:
            if link.peer_has_failed:
                return False
        return bool(progress == _ENQUEUED)

    def _add_transfers(self, messages: Sequence[Any], first: int) -> list[RingTransfer]:
        """Make the handles of messages that C has begun, from the `first` on."""
        begun = self._new
        self._reserve(self._capacity)
        return [
            link.add_transfer(tensor, begun[number], is_receive=is_receive)
            for number, (link, tensor, _, _, is_receive) in enumerate(messages)
            if number >= first
        ]

    @staticmethod
    def _end(
        links: Sequence[RingLink], works: Sequence[RingTransfer], *, caller_waits: bool
    ) -> None:
        for work in works:
            if work.state.progress == _FAILED:
                work.link.handle_driver_failure(work)
        for link in links:
            link.end_exchange(caller_waits=caller_waits)


def _addresses(states: Iterable[Any]) -> Any:
    """Pointers to each `struct transfer`."""
    found = [ctypes.addressof(state) for state in states]
    return (ctypes.c_uint64 * len(found))(*found)
