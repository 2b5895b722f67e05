"""A link between two devices of one host whose streams order themselves (see ring.py).

`send` and `recv` put copies into a stream of the link and return. What cannot be enqueued yet (the
ring is full, or the peer has not sent) is enqueued by whoever comes first: the next call, a
`wait()`, or the link's thread, which also watches deadlines and the peer, and sleeps while nothing
is under way. What happens when an end fails is in failing.py.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import threading
import time
from functools import partial

import torch

from hetero.device.device import CurrentStream, Device, Event
from hetero.errors import LinkError
from hetero.link.base import LinkDescription, Work, require_contiguous, sendable
from hetero.link.flow import SMALL_BYTES, EntryRefused, Flow
from hetero.link.handshake import Rendezvous, compare
from hetero.link.header import PROTOCOL_VERSION, HeaderWriter, job_token
from hetero.link.ring import COUNTER_MASK, ahead
from hetero.link.ring_failure import WATCH_SECONDS, FailingLink
from hetero.link.ring_transfer import RingEnds, RingTransfer
from hetero.native.binding import native

_IDLE_SECONDS = 1.0
_JOIN_SECONDS = 5.0
_REST_SECONDS = 10.0
_SPIN_SECONDS = 500e-6
_GRACE_SECONDS = 200e-6
_DRIVER_REMEDY = "see the log of the GPU driver"

_log = logging.getLogger(__name__)


def agree(
    connection: socket.socket,
    rendezvous: Rendezvous,
    *,
    transport: str,
    ring_bytes: int,
    chunk_bytes: int,
    device: Device,
) -> None:
    """Both ends must open the link with the same protocol and the same ring. Raises LinkError."""
    agreed = {
        "protocol": PROTOCOL_VERSION,
        "transport": transport,
        "ring_bytes": ring_bytes,
        "chunk_bytes": chunk_bytes,
        "checksum_bytes": device.checksum_bytes,
    }
    compare(connection, rendezvous, agreed)


class RingLink(FailingLink):
    """A link over a ring that two devices fill and empty by themselves."""

    def __init__(
        self,
        description: LinkDescription,
        *,
        transport: str,
        ends: RingEnds,
        device: Device,
        chunk_bytes: int,
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        chunk_bytes = min(chunk_bytes, ends.ring_bytes // 2)
        small_bytes = min(small_bytes, chunk_bytes)
        flow = partial(Flow, device, ends, chunk_bytes=chunk_bytes, small_bytes=small_bytes)
        outgoing, incoming = flow(is_outgoing=True), flow(is_outgoing=False)
        super().__init__(description, ends=ends, outgoing=outgoing, incoming=incoming)
        self.transport = transport
        self.is_rung_by_c = outgoing.rings_peer
        self._device = device
        self._headers = HeaderWriter(job=job_token(description.job))
        self._doorbell_address = ends.mine.doorbell_address()
        self._spin = native().native_spin
        self._wanted = threading.Event()
        """Set when the link's thread should look: something waits that nobody else may bring on."""
        self._resting = False
        """Whether the link's thread sleeps until it is wanted."""
        self._callers = 0
        """Callers in `wait()`, who make progress themselves."""
        self._thread = threading.Thread(
            target=self._watch,
            name=f"{transport} {description.rank}-{description.peer} watch",
            daemon=True,
        )
        self._thread.start()

    def send(self, tensor: torch.Tensor, *, tag: int = 0) -> Work:
        self.check()
        self._require_here(tensor)
        source = sendable(tensor)
        stream = self._device.current_stream()
        if self._resting:
            self._wanted.set()
        # Not with the lock: it may take long, on a stream that is full and waits for the peer.
        ready = None if self._out.is_small(source.nbytes) else self._device.record_event()
        with self._lock:
            self._require_open()
            transfer = self._transfer(source, stream, ready=ready, tag=tag, is_receive=False)
            self._count_sent(source)
            self._out.waiting.append(transfer)
            self._enqueue(sender=stream)
            if transfer.ready is None and transfer.end is None:
                transfer.ready = self._device.record_event()
            self._release_completed()
        if transfer.end is None:
            self._wanted.set()
        return transfer

    def recv(self, tensor: torch.Tensor, *, tag: int = 0) -> Work:
        self.check()
        self._require_here(tensor)
        require_contiguous(tensor)
        stream, ready = self._device.current_stream(), self._device.record_event()
        with self._lock:
            self._require_open()
            transfer = self._transfer(
                tensor.detach(), stream, ready=ready, tag=tag, is_receive=True
            )
            self._count_received(tensor)
            if self._in.is_small(transfer.nbytes):
                # Left to the caller's `wait`, which may put it into the caller's stream.
                self._enqueue()
                self._in.waiting.append(transfer)
            else:
                self._in.waiting.append(transfer)
                self._enqueue()
            self._release_completed()
        # A caller that waits at once is faster than the thread, and the thread would be in its way.
        is_large = transfer.nbytes > self._ends.ring_bytes // 2
        if self._resting or (is_large and transfer.end is None):
            self._wanted.set()
        return transfer

    def lock_for_exchange(self) -> CurrentStream | None:
        """Take the lock for `announce`, and say what the caller's stream is.

        None, without the lock, where messages have to queue up behind others, or cannot go into the
        caller's stream.
        """
        stream = self._device.current_stream()
        if not stream.is_current_device():
            return None
        self._lock.acquire()
        if self._out.waiting or self._in.waiting or self._broken is not None or self._closed:
            self._lock.release()
            return None
        return stream

    def unlock(self) -> None:
        self._lock.release()

    def announce(
        self,
        tensor: torch.Tensor,
        piece: tuple[int, int],
        stream: CurrentStream,
        *,
        tag: int,
        is_receive: bool,
    ) -> RingTransfer:
        """The next message of a direction, of which C is told at once. Called with the lock.

        Args:
            piece: the first of the tensor's bytes, and how many.
        """
        self._require_here(tensor)
        transfer = self._transfer(
            tensor, stream, ready=None, tag=tag, is_receive=is_receive, piece=piece
        )
        counters = self.counters
        if is_receive:
            counters.messages_received += 1
            counters.bytes_received += transfer.nbytes
        else:
            counters.messages_sent += 1
            counters.bytes_sent += transfer.nbytes
        # Before the call, in case an exception of a signal's handler hides what it returns.
        transfer.begun = True
        transfer.flow.waiting.append(transfer)
        return transfer

    def note_driver_failure(self, transfer: RingTransfer) -> None:
        """After all announced messages have been noted. Called with the lock."""
        if self._broken is None:
            what = str(transfer.flow.driver_failure(transfer))
            self._break(self._transfer_failure(what, remedy=_DRIVER_REMEDY))

    def end_exchange(self, *, is_watched: bool) -> bool:
        """Ring for what was enqueued, once all is noted. Called with the lock.

        `is_watched` is whether the caller goes on waiting. Returns whether the peer has not failed.
        """
        if not self.is_rung_by_c:
            self._ends.theirs.ring()
        if self._resting or (not is_watched and (self._out.waiting or self._in.waiting)):
            self._wanted.set()
        self._release_completed()
        return not self._ends.theirs.has_failed

    def close(self) -> None:
        if self._closed:
            return
        self._finish_sends()
        self._closed = True
        with self._lock:
            error = self._broken or self.failure(
                "the link was closed while a transfer was under way",
                expected="every transfer waited for",
                remedy="close it later",
            )
            self._end_transfers(error)
        self._ends.mine.close()
        self._ends.theirs.ring()
        self._wanted.set()
        self._thread.join(_JOIN_SECONDS)
        if self._callers_have_left() and self._device.synchronize(_REST_SECONDS):
            # A carrier may copy to and from their tensors until then.
            self._ends.close()
            self._out.aborted.clear()
            self._in.aborted.clear()
        else:
            # Kept for ever, so that nothing unmaps what a device may still use.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            _log.warning(
                "%s over %s: work of the device or a wait that uses the link's memory has not "
                "ended in time after the link was closed; the memory goes with the process",
                self.description,
                self.transport,
            )

    def _callers_have_left(self) -> bool:
        """Whether no other thread is in `wait()`, which looks at words of the memory, in time."""
        deadline = time.monotonic() + _JOIN_SECONDS
        while self._callers and time.monotonic() < deadline:
            time.sleep(_SPIN_SECONDS)
        return not self._callers

    def request_progress(self) -> None:
        """Have the link's thread bring on what is asked after but not waited for."""
        if not self._wanted.is_set():
            self._wanted.set()

    def progress_until_enqueued(self, transfer: RingTransfer) -> None:
        """Enqueue what can be until all of the transfer is, or it has failed."""
        # Asked for by each thread before it calls the driver.
        stream = self._device.current_stream()
        with self._lock:
            self._callers += 1
        try:
            with self.timed_wait():
                self._progress(transfer, receiver=stream if transfer.is_receive else None)
        finally:
            with self._lock:
                self._callers -= 1
                if self._out.waiting or self._in.waiting:
                    self._wanted.set()

    def _progress(self, transfer: RingTransfer, *, receiver: CurrentStream | None) -> None:
        spin_until = time.monotonic() + _SPIN_SECONDS
        while True:
            bell, posted = self._ends.mine.doorbell, self._ends.incoming.posted
            with self._lock:
                self._enqueue(receiver=receiver, awaited=transfer)
            if transfer.end is not None or transfer.error is not None:
                return
            spin_seconds = spin_until - time.monotonic()
            if spin_seconds > 0:
                # A sleep here would cost a wake-up. An entry is posted before the doorbell rings.
                posted_at = self._ends.incoming.posted_address
                microseconds = int(spin_seconds * 1e6)
                self._spin(self._doorbell_address, bell, posted_at, posted, microseconds)
                continue
            self._ends.mine.sleep(bell, WATCH_SECONDS)
            with self._lock:
                self._check_progress()

    def _transfer(
        self,
        tensor: torch.Tensor,
        stream: CurrentStream,
        *,
        ready: Event | None,
        tag: int,
        is_receive: bool,
        piece: tuple[int, int] | None = None,
    ) -> RingTransfer:
        """`piece`: what of the tensor goes as bytes, where it does not go as what it is."""
        flow = self._in if is_receive else self._out
        sequence = flow.sequence
        flow.sequence = sequence + 1
        begin, nbytes = piece or (0, tensor.nbytes)
        dtype, shape = (torch.uint8, (nbytes,)) if piece else (tensor.dtype, tensor.shape)
        # By place, for names cost a microsecond.
        return RingTransfer(
            self,
            flow,
            tensor,
            ready,
            stream.key,
            is_receive,
            time.monotonic() + self.description.timeout,
            sequence,
            self._headers.pack(dtype, shape, sequence=sequence, tag=tag),
            nbytes,
            tensor.data_ptr() + begin,
        )

    def _enqueue(
        self,
        *,
        sender: CurrentStream | None = None,
        receiver: CurrentStream | None = None,
        awaited: RingTransfer | None = None,
    ) -> None:
        """Put into the streams all that can be put there. Called with the lock.

        `sender` and `receiver` are the stream of a caller that is sending, or waits for `awaited`.
        """
        if self._broken is not None:
            self._end_transfers(self._broken)
            return
        try:
            sent = self._out.enqueue(sender)
            moved = self._in.enqueue(receiver, awaited=awaited) or sent
        except EntryRefused as refusal:
            self._break(self._refused(self._in.waiting[0], str(refusal)))
            return
        except (LinkError, RuntimeError) as error:
            self._break(self._transfer_failure(str(error), remedy=_DRIVER_REMEDY))
            return
        if moved:
            self._ends.theirs.ring()

    def _watch(self) -> None:
        """The link's thread: progress that no caller makes, deadlines, and the peer's end."""
        self._device.use()
        last_busy = time.monotonic()
        while not self._closed:
            bell = self._ends.mine.doorbell
            with self._lock_or_release():
                self._enqueue()
                self._check_progress()
                waiting = bool(self._out.waiting or self._in.waiting)
                in_flight = bool(self._out.in_flight or self._in.in_flight)
            if waiting or in_flight:
                last_busy = time.monotonic()
            if waiting and not self._callers:
                self._ends.mine.sleep(bell, WATCH_SECONDS)
            elif waiting or time.monotonic() - last_busy < _IDLE_SECONDS:
                if self._wanted.wait(WATCH_SECONDS):
                    self._wanted.clear()
                    # Whoever asked most often waits itself, at once, and is faster.
                    time.sleep(_GRACE_SECONDS)
            else:
                self._rest()
                last_busy = time.monotonic()

    def _rest(self) -> None:
        """Sleep until there is something to watch."""
        self._resting = True
        with self._lock_or_release():
            idle = not (self._out.transfers() or self._in.transfers())
        if idle and not self._closed:
            self._wanted.wait()
        self._resting = False
        self._wanted.clear()

    def _finish_sends(self) -> None:
        """Wait until the peer has taken what was sent, while it lives and the deadline allows."""
        deadline = time.monotonic() + self.description.timeout
        while self._broken is None and time.monotonic() < deadline:
            bell = self._ends.mine.doorbell
            with self._lock:
                self._enqueue()
            taken = ahead(self._ends.outgoing.consumed, self._out.count & COUNTER_MASK) >= 0
            if (taken and not self._out.waiting) or self._ends.theirs.is_closed:
                return
            if self._ends.peer_has_gone() or self._ends.theirs.has_failed:
                return
            self._ends.mine.sleep(bell, 0.002)
