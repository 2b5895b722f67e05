"""The transfers of one direction of an in-place link, from the request until their last chunk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hetero.errors import LinkError
from hetero.transport.base import as_bytes
from hetero.transport.header import Header
from hetero.transport.transfer import Transfer


@dataclass(eq=False)
class InPlaceTransfer(Transfer):
    """A tensor in host memory, as the bytes of its chunks that have yet to move."""

    header: Header = field(kw_only=True)
    chunk_bytes: int = field(kw_only=True)
    flow: Flow = field(kw_only=True)
    first_chunk: int = field(kw_only=True)
    """The number of its first chunk in the direction."""

    def __post_init__(self) -> None:
        self.bytes = as_bytes(self.tensor).numpy().data
        self.packed_header = self.header.pack()
        self.unclaimed = set(self.offsets())
        self.unmoved = len(self.unclaimed)

    def offsets(self) -> range:
        """Where its chunks begin; an empty message has one, empty, chunk."""
        return range(0, max(self.header.nbytes, 1), self.chunk_bytes)

    def chunk(self, offset: int) -> memoryview:
        return self.bytes[offset : offset + self.chunk_bytes]

    def number(self, offset: int) -> int:
        return self.first_chunk + offset // self.chunk_bytes

    def done(self) -> bool:
        self.flow.check_deadline()
        return super().done()

    def wait(self) -> None:
        if not self.ended.is_set():
            with self.link.timed_wait():
                while not self.ended.wait(max(0.0, self.flow.seconds_left())):
                    self.flow.check_deadline()
        if self.error is not None:
            raise self.error


Explanation = Callable[[InPlaceTransfer], LinkError]
"""Why a transfer has failed, once it is known which one."""


class Flow:
    """What is under way in one direction, by sequence number, and since when nothing has moved."""

    def __init__(
        self, *, streams: int, timeout: float, on_overdue: Callable[[InPlaceTransfer], None]
    ) -> None:
        self._streams = streams
        self._timeout = timeout
        self._on_overdue = on_overdue
        self._changed = threading.Condition(threading.RLock())
        self._under_way: dict[int, InPlaceTransfer] = {}
        self._sequence = 0
        self._chunks = 0
        self._moved = 0.0
        self._explain: Explanation | None = None
        self._ended_streams = 0
        self._end_of_stream: Explanation | None = None
        self._awaited: list[int] = []
        """What is next on the streams that hold a message nobody has asked for."""

    def add(self, begin: Callable[[int, int], InPlaceTransfer]) -> InPlaceTransfer:
        """Begin the next transfer, given its sequence number and that of its first chunk."""
        with self._changed:
            transfer = begin(self._sequence, self._chunks)
            self._sequence += 1
            self._chunks += transfer.unmoved
            if self._explain is not None:
                transfer.fail(self._explain(transfer))
                return transfer
            if not self._under_way:
                self._moved = time.monotonic()
            self._under_way[transfer.header.sequence] = transfer
            self._changed.notify_all()
            self._end_if_nothing_can_come()
            return transfer

    def recognise(self, packed_header: bytes) -> InPlaceTransfer | None:
        """The oldest transfer, if this is its header; most chunks belong to it."""
        with self._changed:
            oldest = next(iter(self._under_way.values()), None)
        return oldest if oldest is not None and oldest.packed_header == packed_header else None

    def claim(self, sequence: int | None) -> InPlaceTransfer | None:
        """The transfer of a number once it has been asked for; None when the flow has ended.

        For a number that has been, or none, it is the oldest one under way.
        """
        with self._changed:
            while self._explain is None:
                oldest = next(iter(self._under_way), self._sequence)
                wanted = oldest if sequence is None or sequence < oldest else sequence
                if wanted in self._under_way:
                    return self._under_way[wanted]
                self._awaited.append(wanted)
                self._end_if_nothing_can_come()
                if self._explain is None:
                    self._changed.wait()
                self._awaited.remove(wanted)
            return None

    def end_stream(self, explain: Explanation) -> None:
        """One stream has come to its end; the others may still hold what the peer sent before."""
        with self._changed:
            self._ended_streams += 1
            self._end_of_stream = explain
            self._end_if_nothing_can_come()

    def _end_if_nothing_can_come(self) -> None:
        """End it when no stream will bring what is under way. Called with the lock held."""
        if self._end_of_stream is None:
            return
        # A stream is in order: behind a later message there is no part of an earlier one.
        waiting = [sequence for sequence in self._awaited if sequence not in self._under_way]
        is_over = self._ended_streams == self._streams
        if is_over or (self._under_way and self._ended_streams + len(waiting) == self._streams):
            self.end(self._end_of_stream)

    def moved(self, transfer: InPlaceTransfer) -> None:
        """One chunk of it has been moved; the last ends it."""
        with self._changed:
            self._moved = time.monotonic()
            transfer.unmoved -= 1
            if transfer.unmoved == 0 and not transfer.ended.is_set():
                del self._under_way[transfer.header.sequence]
                transfer.ended.set()

    def seconds_left(self) -> float:
        """Until the oldest transfer is overdue, should nothing move."""
        return self._moved + self._timeout - time.monotonic()

    def check_deadline(self) -> None:
        """Report the oldest transfer if nothing has moved for too long. Never blocks."""
        with self._changed:
            oldest = next(iter(self._under_way.values()), None)
            if oldest is None or self.seconds_left() > 0:
                return
        self._on_overdue(oldest)

    def end(self, explain: Explanation) -> None:
        """Fail what is under way and all that comes after it. The first reason stays."""
        with self._changed:
            if self._explain is None:
                self._explain = explain
            for transfer in self._under_way.values():
                transfer.fail(self._explain(transfer))
            self._under_way.clear()
            self._changed.notify_all()
