"""A link between two devices of one host whose streams order themselves (see ring.py).

`send` and `recv` put copies into a stream of the link and return. What cannot be enqueued yet (the
ring is full, or the peer has not sent) is enqueued by whoever comes first: the next call, a
`wait()`, or the link's thread, which also watches deadlines and the peer, and sleeps while nothing
is under way.

When a link fails while a stream waits for the peer, the failure is noted first and the stream is
then released, so it may copy bytes that are not the message. Whoever waits for the device and then
calls `check()` before using what came of it therefore never uses them.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetero.device.base import Mark
from hetero.device.ordered import CurrentStream, OrderedDevice
from hetero.errors import LinkError
from hetero.transport import futex
from hetero.transport.base import Link, LinkDescription, Work, require_contiguous, sendable
from hetero.transport.futex import Seen
from hetero.transport.header import Header, HeaderWriter, job_token
from hetero.transport.ordered.flows import SMALL_BYTES, EntryRefused, Limits
from hetero.transport.ordered.native_flows import make_flows
from hetero.transport.ordered.ring import COUNTER_MASK, ahead
from hetero.transport.ordered.transfer import OrderedEnds, OrderedTransfer

_WATCH_SECONDS = 0.1
_IDLE_SECONDS = 1.0
_JOIN_SECONDS = 5.0
_REST_SECONDS = 10.0
_SPIN_SECONDS = 500e-6
_GRACE_SECONDS = 200e-6

_log = logging.getLogger(__name__)


class OrderedLink(Link):
    """A link over a ring that two devices fill and empty by themselves."""

    def __init__(
        self,
        description: LinkDescription,
        *,
        transport: str,
        ends: OrderedEnds,
        device: OrderedDevice,
        chunk_bytes: int,
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        super().__init__(description)
        self.transport = transport
        self._ends = ends
        self._device = device
        self._headers = HeaderWriter(job=job_token(description.job))
        chunk_bytes = min(chunk_bytes, ends.ring_bytes // 2)
        limits = Limits(chunk_bytes=chunk_bytes, small_bytes=min(small_bytes, chunk_bytes))
        self._out, self._in = make_flows(device, ends, limits=limits)
        self._doorbell_address = ends.mine.doorbell_address()
        self._posted_address = ends.incoming.host_addresses().posted
        self._lock = threading.Lock()
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

    def send(self, tensor: torch.Tensor) -> Work:
        self.check()
        source = sendable(tensor)
        stream = self._device.current_stream()
        if self._resting:
            self._wanted.set()
        # Not with the lock: it may take long, on a stream that is full and waits for the peer.
        ready = None if self._out.is_small(source.nbytes) else self._device.mark()
        with self._lock:
            self._require_open()
            transfer = self._transfer(source, stream, ready=ready, is_receive=False)
            self._count_sent(source)
            self._out.waiting.append(transfer)
            self._enqueue(sender=stream)
            if transfer.ready is None and transfer.landed is None:
                transfer.ready = self._device.mark()
            self._forget_ended()
        if transfer.landed is None:
            self._wanted.set()
        return transfer

    def recv(self, tensor: torch.Tensor) -> Work:
        self.check()
        require_contiguous(tensor)
        stream, ready = self._device.current_stream(), self._device.mark()
        with self._lock:
            self._require_open()
            transfer = self._transfer(tensor.detach(), stream, ready=ready, is_receive=True)
            self._count_received(tensor)
            if self._in.is_small(transfer.nbytes):
                # Left to the caller's `wait`, which may put it into the caller's stream.
                self._enqueue()
                self._in.waiting.append(transfer)
            else:
                self._in.waiting.append(transfer)
                self._enqueue()
            self._forget_ended()
        # A caller that waits at once is faster than the thread, and the thread would be in its way.
        is_large = transfer.nbytes > self._ends.ring_bytes // 2
        if self._resting or (is_large and transfer.landed is None):
            self._wanted.set()
        return transfer

    def check(self) -> None:
        if self._broken is None and not self._closed and self._ends.theirs.has_failed:
            with self._lock:
                self._hear_of_fault()
        super().check()

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
        self._see_callers_off()
        if self._device.rests_within(_REST_SECONDS):
            self._out.given_up.clear()
            self._in.given_up.clear()
            self._ends.close()
        else:
            # Kept for ever, so that nothing unmaps what a device may still use.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            _log.warning(
                "%s over %s: work of the device that uses the link's memory has not ended %g s "
                "after the link was closed; the memory goes with the process",
                self.description,
                self.transport,
                _REST_SECONDS,
            )

    def _see_callers_off(self) -> None:
        """Wait until no other thread is in `wait()`, which looks at words of the memory."""
        deadline = time.monotonic() + _JOIN_SECONDS
        while self._callers and time.monotonic() < deadline:
            time.sleep(_SPIN_SECONDS)

    def look_after(self) -> None:
        """Have the link's thread bring on what is asked after but not waited for."""
        if not self._wanted.is_set():
            self._wanted.set()

    def progress_until_enqueued(self, transfer: OrderedTransfer) -> None:
        """Enqueue what can be until all of the transfer is, or it has failed."""
        begin = time.perf_counter()
        # Asked for by each thread before it calls the driver.
        stream = self._device.current_stream()
        with self._lock:
            self._callers += 1
        try:
            self._progress(transfer, receiver=stream if transfer.is_receive else None)
        finally:
            with self._lock:
                self._callers -= 1
                if self._out.waiting or self._in.waiting:
                    self._wanted.set()
            self.counters.wait_seconds += time.perf_counter() - begin

    def _progress(self, transfer: OrderedTransfer, *, receiver: CurrentStream | None) -> None:
        spin_until = time.monotonic() + _SPIN_SECONDS
        while True:
            bell, posted = self._ends.mine.doorbell, self._ends.incoming.posted
            with self._lock:
                self._enqueue(receiver=receiver, awaited=transfer)
            if transfer.landed is not None or transfer.error is not None:
                return
            spin_seconds = spin_until - time.monotonic()
            if spin_seconds > 0:
                # A sleep here would cost a wake-up. An entry is posted before the doorbell rings.
                seen = Seen(self._doorbell_address, bell), Seen(self._posted_address, posted)
                futex.spin(*seen, seconds=spin_seconds)
                continue
            self._ends.mine.sleep(bell, _WATCH_SECONDS)
            with self._lock:
                self._look_for_trouble()

    def _transfer(
        self,
        tensor: torch.Tensor,
        stream: CurrentStream,
        *,
        ready: Mark | None,
        is_receive: bool,
    ) -> OrderedTransfer:
        flow = self._in if is_receive else self._out
        sequence = flow.sequence
        flow.sequence += 1
        return OrderedTransfer(
            link=self,
            tensor=tensor,
            ready=ready,
            caller=stream.key,
            is_receive=is_receive,
            deadline=time.monotonic() + self.description.timeout,
            sequence=sequence,
            header=self._headers.pack(tensor, sequence=sequence),
            nbytes=tensor.nbytes,
            address=tensor.data_ptr(),
        )

    def _enqueue(
        self,
        *,
        sender: CurrentStream | None = None,
        receiver: CurrentStream | None = None,
        awaited: OrderedTransfer | None = None,
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
            self._break(self._trouble(str(error), remedy="see the log of the GPU driver"))
            return
        if moved:
            self._ends.theirs.ring()

    def _forget_ended(self) -> None:
        self._out.forget_ended()
        self._in.forget_ended()

    def _refused(self, transfer: OrderedTransfer, difference: str) -> LinkError:
        self._ends.mine.fail(f"rank {self.description.rank} refused a message: {difference}")
        expected = Header.unpack(transfer.header)
        return self.failure(
            f"message {transfer.sequence} has {difference}",
            expected=f"{expected.dtype} of shape {expected.shape}",
            remedy="start both sides with the same model, batch and parallel flags",
        )

    def _watch(self) -> None:
        """The link's thread: progress that no caller makes, deadlines, and the peer's end."""
        self._device.use()
        last_busy = time.monotonic()
        while not self._closed:
            bell = self._ends.mine.doorbell
            with self._lock_or_release():
                self._enqueue()
                self._look_for_trouble()
                waiting = bool(self._out.waiting or self._in.waiting)
                under_way = bool(self._out.under_way or self._in.under_way)
            if waiting or under_way:
                last_busy = time.monotonic()
            if waiting and not self._callers:
                self._ends.mine.sleep(bell, _WATCH_SECONDS)
            elif waiting or time.monotonic() - last_busy < _IDLE_SECONDS:
                if self._wanted.wait(_WATCH_SECONDS):
                    self._wanted.clear()
                    # Whoever asked most often waits itself, at once, and is faster.
                    time.sleep(_GRACE_SECONDS)
            else:
                self._rest()
                last_busy = time.monotonic()

    @contextmanager
    def _lock_or_release(self) -> Iterator[None]:
        """The lock, for the link's thread.

        Whoever holds it may be in a call of the driver that does not return: on a stream that is
        full, and waits for a peer that is no more. After the deadline the stream is released.
        """
        patience = self.description.timeout
        while not self._lock.acquire(timeout=patience):
            patience = _WATCH_SECONDS
            if self._broken is None:
                self._give_up(
                    self._trouble(
                        "a call of the device's driver has not returned for "
                        f"{self.description.timeout:g} s",
                        remedy=f"see the log of rank {self.description.peer}",
                    )
                )
            self._release_streams()
        try:
            yield
        finally:
            self._lock.release()

    def _rest(self) -> None:
        """Sleep until there is something to watch."""
        self._resting = True
        with self._lock_or_release():
            idle = not (self._out.transfers() or self._in.transfers())
        if idle and not self._closed:
            self._wanted.wait()
        self._resting = False
        self._wanted.clear()

    def _look_for_trouble(self) -> None:
        """Break the link if a transfer is overdue or the peer has ended. Called with the lock."""
        self._forget_ended()
        under_way = [*self._out.transfers(), *self._in.transfers()]
        if self._broken is not None or not under_way:
            return
        peer = self.description.peer
        if self._ends.theirs.has_failed:
            self._hear_of_fault()
        elif any(time.monotonic() > t.deadline and not t.done() for t in under_way):
            timeout = self.description.timeout
            self._break(
                self._trouble(
                    f"nothing moved for {timeout:g} s", remedy="see what the peer's log says"
                )
            )
        elif (self._ends.theirs.is_closed or self._ends.peer_has_gone()) and self._needs_peer():
            self._break(
                self._trouble(
                    f"rank {peer} has ended or closed the link",
                    remedy=f"see the log of rank {peer}",
                )
            )

    def _hear_of_fault(self) -> None:
        """Break the link because the peer has. Called with the lock."""
        fault = self._ends.theirs.fault
        if self._broken is None and fault is not None:
            peer = self.description.peer
            self._break(self._trouble(fault, remedy=f"see the log of rank {peer}"))

    def _needs_peer(self) -> bool:
        """Whether something waits for what only the peer can do."""
        # What the peer did before it ended counts: look once more.
        self._enqueue()
        outgoing, incoming = self._ends.outgoing, self._ends.incoming
        stuck_out = ahead(self._out.awaited, outgoing.consumed) > 0 and bool(self._out.under_way)
        stuck_in = ahead(self._in.awaited, incoming.produced) > 0 and bool(self._in.under_way)
        return bool(self._out.waiting or self._in.waiting or stuck_out or stuck_in)

    def _trouble(self, what: str, *, remedy: str) -> LinkError:
        waiting = [*self._in.transfers(), *self._out.transfers()]
        expected = "an open link"
        if waiting:
            verb = "from" if waiting[0].is_receive else "taken by"
            tensor = waiting[0].tensor
            expected = (
                f"{tensor.dtype} of shape {tuple(tensor.shape)} {verb} rank "
                f"{self.description.peer} within {self.description.timeout:g} s"
            )
        return self.failure(what, expected=expected, remedy=remedy)

    def _break(self, error: LinkError) -> None:
        """Note the failure, tell the peer, and only then release what waits for it."""
        self._give_up(error)
        self._end_transfers(error)

    def _give_up(self, error: LinkError) -> None:
        self._broken = error
        if not self._ends.mine.has_failed:
            self._ends.mine.fail(f"rank {self.description.rank} gave the link up: {error}"[:900])
        self._ends.theirs.ring()

    def _end_transfers(self, error: LinkError) -> None:
        for flow in (self._out, self._in):
            for transfer in flow.transfers():
                if not transfer.done():
                    transfer.error = error
            flow.give_up()
        self._release_streams()

    def _release_streams(self) -> None:
        outgoing, incoming = self._ends.outgoing, self._ends.incoming
        holds_out = ahead(self._out.awaited, outgoing.consumed) > 0
        holds_in = ahead(self._in.awaited, incoming.produced) > 0
        if (holds_out or holds_in) and not self._ends.mine.has_failed:
            # The words are the peer's too: it must not take them for its device's.
            self._ends.mine.fail(f"rank {self.description.rank} closed the link")
        if holds_out:
            outgoing.release_sender(self._out.awaited)
        if holds_in:
            incoming.release_receiver(self._in.awaited)

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
