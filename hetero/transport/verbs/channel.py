"""Both directions of a link over its rails: who posts what where, and what follows a lost rail.

One thread sleeps on every rail's completion channel, on the NICs' own events and on the control
connection. The link's two threads post their chunks themselves, look for completions themselves
before they wait, and are woken by that thread. All of them work under one lock, which nobody holds
while waiting.

When a rail is lost at one end, that end stops its queue pair and says so; the other stops its own
and answers. Only when both have stopped can no late packet fall into a slot that is used again, and
only then are the chunks repeated on other rails.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hetero.transport.chunked import Chunk
from hetero.transport.control import Control
from hetero.transport.verbs.flow import (
    RECORD_BYTES,
    Incoming,
    Outgoing,
    pack_record,
    unpack_record,
)
from hetero.transport.verbs.library import Verbs
from hetero.transport.polling import Poller
from hetero.transport.verbs.rail import Rail
from hetero.transport.verbs.rings import Rings

_log = logging.getLogger(__name__)
_DRAIN_SECONDS = 5.0
_JOIN_SECONDS = 5.0
_CHECKS_PER_STALL = 4
_REFUSAL_CHARACTERS = 500


class Channel:
    """What both ends of a link at this rank share."""

    def __init__(
        self,
        verbs: Verbs,
        rails: Sequence[Rail],
        control: Control,
        rings: Rings,
        *,
        name: str,
        peer: int,
        stall_seconds: float,
    ) -> None:
        self._verbs = verbs
        self._rails = rails
        self._control = control
        self._rings = rings
        self._name = name
        self._peer = peer
        self._stall_seconds = stall_seconds
        self._records = rings.records.data.numpy().data
        self._outgoing = Outgoing(rings.shape.slots)
        self._incoming = Incoming(rings.shape.slots)
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._refusal: str | None = None
        self._peer_has_gone = False
        self._send_closed = self._recv_closed = self._stopping = False
        self._watching = False
        self._poller = Poller()
        self._poller.attend(control.fileno(), self._hear_control)
        for rail in rails:
            self._poller.attend(rail.channel_fd, partial(self._try, rail, rail.hear))
            if rail.news_fd is not None:
                self._poller.attend(rail.news_fd, partial(self._hear_news, rail))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def slot_bytes(self) -> int:
        return self._rings.shape.slot_bytes

    # The sending direction.

    def acquire(self, deadline: float | None) -> torch.Tensor | None:
        with self._changed:
            while True:
                self._require_sendable()
                number = self._outgoing.acquire()
                if number is None:
                    self._progress()
                    self._require_sendable()
                    number = self._outgoing.acquire()
                if number is not None:
                    begin, _ = self._rings.place(number)
                    return self._rings.slots.data[begin : begin + self.slot_bytes]
                if deadline is None:
                    return None
                self._wait(deadline)

    def publish(self, chunk: Chunk) -> None:
        with self._changed:
            self._require_sendable()
            number = self._outgoing.publish(chunk.nbytes)
            _, record = self._rings.place(number)
            self._records[record : record + RECORD_BYTES] = pack_record(chunk)
            self._pump()

    def close_sending(self) -> None:
        """See that what was published arrives, as long as somebody is there to receive it."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        with self._changed:
            while self._outgoing.sizes and self._error is None and not self._peer_has_gone:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(remaining)
            self._send_closed = True
            self._changed.notify_all()

    # The receiving direction.

    def take(self, deadline: float | None) -> tuple[Chunk, torch.Tensor] | None:
        with self._changed:
            while True:
                self._require_open(self._recv_closed)
                taken = self._incoming.take()
                if taken is None:
                    self._progress()
                    taken = self._incoming.take()
                if taken is not None:
                    break
                # What has arrived still counts, whatever has failed since.
                if not any(rail.reads for rail in self._rails):
                    self._raise_error()
                if deadline is None:
                    return None
                self._wait(deadline)
        number, chunk = taken
        if self._rings.visible is not None:
            self._rings.visible()
        begin, _ = self._rings.place(number)
        begin += self._rings.receiving
        return chunk, self._rings.slots.data[begin : begin + chunk.nbytes]

    def release(self) -> None:
        with self._changed:
            self._incoming.release()
            if not self._stopping:
                self._pay()

    def refuse(self, reason: str) -> None:
        with self._changed:
            self._tell({"refused": reason[:_REFUSAL_CHARACTERS]})

    def close_receiving(self) -> None:
        with self._changed:
            self._recv_closed = True
            self._changed.notify_all()

    # The end.

    def close(self) -> None:
        """Release everything but the rings. No thread may be in another method here by now."""
        with self._changed:
            if self._stopping:
                return
            self._stopping = self._send_closed = self._recv_closed = True
            self._changed.notify_all()
        self._poller.wake()
        self._thread.join(_JOIN_SECONDS)
        with self._changed:
            for rail in self._rails:
                rail.close()
            self._control.close()
            self._poller.close()

    # Waiting. All below is called with the lock held, except for `_run`.

    def _wait(self, deadline: float) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"rank {self._peer} did not move within the time allowed")
        self._changed.wait(remaining)

    def _require_open(self, closed: bool) -> None:
        if closed:
            raise ConnectionError("the link was closed")

    def _require_sendable(self) -> None:
        self._require_open(self._send_closed)
        if self._refusal is not None:
            raise ConnectionError(self._refusal)
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise ConnectionError(str(self._error)) from self._error

    def _run(self) -> None:
        """Sleep until a rail, a NIC or the peer has something to say, and see to it."""
        while True:
            watched = self._stall_seconds / _CHECKS_PER_STALL
            ready = self._poller.wait(watched if self._watching else None)
            with self._changed:
                if self._stopping:
                    return
                try:
                    self._poller.handle(ready)
                    self._progress()
                    self._watch(is_due=not ready)
                except Exception as error:  # whatever it is, the link's users must hear of it
                    self._fail(error)
                self._changed.notify_all()

    def _watch(self, *, is_due: bool) -> None:
        """Drop a rail whose oldest request has been under way for too long.

        A NIC whose own link is down may never complete a request, with or without an error. The
        thread sleeps for ever once it was due and nothing was under way.
        """
        busy = [rail for rail in self._rails if rail.waits]
        for rail in busy:
            if (reason := rail.give_up(self._stall_seconds)) is not None:
                self._lose(rail, reason)
        if is_due:
            self._watching = bool(busy)

    # Moving chunks.

    def _progress(self) -> None:
        """See to all completions, and post what can be posted by then."""
        if self._stopping:
            return
        for rail in self._rails:
            self._complete(rail)
        self._pump()
        self._pay()

    def _complete(self, rail: Rail) -> None:
        enums = self._verbs.enums
        while completions := self._poll(rail):
            for done in completions:
                if done.status != enums.IBV_WC_SUCCESS:
                    self._lose(rail, rail.failure(done))
                elif done.opcode == enums.IBV_WC_RECV_RDMA_WITH_IMM:
                    self._arrive(rail, socket.ntohl(done.imm_data))
                    self._receive_again(rail)
                elif done.opcode == enums.IBV_WC_RECV:
                    self._outgoing.credit(socket.ntohl(done.imm_data))
                    self._receive_again(rail)
                elif done.opcode == enums.IBV_WC_RDMA_WRITE:
                    rail.chunk_done()
                    self._outgoing.complete(done.wr_id, rail.index)
                elif done.opcode == enums.IBV_WC_SEND:
                    rail.credit_done()
                elif done.opcode == enums.IBV_WC_RDMA_READ:
                    for number, chunk in rail.seen():
                        self._incoming.arrive(number, chunk)
            self._changed.notify_all()
        self._try(rail, rail.start_reading)
        if rail.reads:
            self._be_watched()

    def _poll(self, rail: Rail) -> list[Any]:
        try:
            return rail.completions()
        except self._verbs.error as error:
            self._lose(rail, str(error))
            return []

    def _receive_again(self, rail: Rail) -> None:
        if rail.live:
            self._try(rail, rail.post_receive)

    def _arrive(self, rail: Rail, number: int) -> None:
        whole = self._incoming.place(number)
        if whole is None:
            return
        slot, record = self._rings.place(whole)
        record += self._rings.receiving_records
        chunk = unpack_record(self._records[record : record + RECORD_BYTES])
        if chunk.nbytes > self.slot_bytes:
            raise ValueError(f"a chunk of {chunk.nbytes} bytes does not fit a slot")
        if rail.read_back is None or chunk.nbytes == 0:
            self._incoming.arrive(whole, chunk)
        else:
            end = self._rings.receiving + slot + chunk.nbytes
            rail.read_back.add((whole, chunk), last_byte=end - 1)

    def _pump(self) -> None:
        """Post waiting chunks, each on the least loaded rail: a faster one is so more often."""
        while self._outgoing.waiting and self._error is None:
            free = [rail for rail in self._rails if rail.has_room]
            if not free:
                return
            rail = min(free, key=lambda rail: rail.chunks_under_way)
            number = self._outgoing.post(rail.index)
            slot, record = self._rings.place(number)
            nbytes = self._outgoing.sizes[number]
            post = partial(rail.post_chunk, number, nbytes=nbytes, slot=slot, record=record)
            self._try(rail, post)
            self._be_watched()

    def _pay(self) -> None:
        """Tell the sender what was released, if that is worth a message."""
        if not self._incoming.owes() or self._error is not None:
            return
        free = [rail for rail in self._rails if rail.can_credit]
        if free:
            rail = min(free, key=lambda rail: rail.chunks_under_way)
            count = self._incoming.tell()
            self._try(rail, partial(rail.post_credit, count))
            self._be_watched()

    def _be_watched(self) -> None:
        if not self._watching:
            self._watching = True
            self._poller.wake()

    def _try(self, rail: Rail, post: Callable[[], None]) -> None:
        try:
            post()
        except self._verbs.error as error:
            self._lose(rail, str(error))

    # Losing rails, and the peer.

    def _lose(self, rail: Rail, reason: str) -> None:
        """Stop a rail at this end and have the peer stop it at the other."""
        if not rail.live:
            return
        rail.let_go()
        self._poller.ignore(rail.news_fd)
        if self._peer_has_gone or self._stopping:
            return
        rail.stop_reading()
        left = sum(other.live for other in self._rails)
        _log.warning(
            "%s: rail %d (%s) is lost: %s; %d of %d rails go on",
            *(self._name, rail.index, rail.port, reason, left, len(self._rails)),
        )
        self._tell({"lost": rail.index, "reason": reason})
        if left == 0:
            self._fail(ConnectionError(f"the last rail, {rail.port}, is lost: {reason}"))
        if rail.peer_let_go:
            self._repeat(rail)

    def _repeat(self, rail: Rail) -> None:
        """Both ends have stopped a rail: what it may not have carried goes over the others."""
        self._complete(rail)
        self._poller.ignore(rail.channel_fd)
        count = self._outgoing.repeat(rail.index, landed=rail.peer_reads_back)
        if count and self._error is None:
            _log.warning("%s: %d chunks of rail %d are sent again", self._name, count, rail.index)
        self._incoming.telling_lost = True
        self._pump()
        self._pay()

    def _hear_control(self) -> None:
        try:
            messages = self._control.receive()
        except OSError:
            self._poller.ignore(self._control.fileno())
            # What has arrived by now still counts.
            for rail in self._rails:
                self._complete(rail)
            self._peer_has_gone = True
            self._fail(ConnectionError(f"rank {self._peer} has ended or closed the link"))
            return
        for message in messages:
            if "refused" in message:
                self._refusal = str(message["refused"])
            if "lost" in message:
                rail = self._rails[int(message["lost"])]
                rail.peer_let_go = True
                if rail.live:
                    self._lose(rail, f"rank {self._peer} says: {message['reason']}")
                else:
                    self._repeat(rail)

    def _hear_news(self, rail: Rail) -> None:
        reason = rail.news()
        if reason is not None:
            self._lose(rail, reason)

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(message)
        except OSError as error:
            self._fail(ConnectionError(f"rank {self._peer} cannot be told of a failure ({error})"))

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._changed.notify_all()
