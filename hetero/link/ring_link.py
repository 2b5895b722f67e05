"""A link over a ring that two devices fill and empty (docs/ring.md).

A `RingLink` has a `Flow` (flow.py) for each direction, and a `RingTransfer` for each message.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hetero.device.device import CurrentStream, Event, Word
from hetero.errors import LinkError
from hetero.link.base import (
    Link,
    LinkDescription,
    Work,
    require_contiguous,
    sendable,
)
from hetero.link.flow import Flow, UnexpectedEntry
from hetero.link.header import DIFFERENCE_REMEDY, Header, unnumbered_header
from hetero.link.monitor import Watch
from hetero.link.ring import RingEnds, RingOptions
from hetero.native.binding import HeaderState, Progress, RingDirection, Transfer, native
from hetero.observe.record import LinkState
from hetero.startup.process import call_in_children

WATCH_SECONDS = 0.1
"""The interval between two checks of deadlines and of the peer."""
_IDLE_SECONDS = 1.0
_JOIN_SECONDS = 5.0
_SYNCHRONIZE_SECONDS = 10.0
_SPIN_SECONDS = 500e-6
_COPY_SECONDS = 1e-3
"""How long a caller sleeps on the doorbell that is also to see what rings none: a stream's copy."""
_HEAD_START_SECONDS = 200e-6
_DRIVER_REMEDY = "see the log of the GPU driver"
_ENQUEUED, _FAILED = int(Progress.ENQUEUED), int(Progress.FAILED)
_UNNUMBERED = int(HeaderState.WITHOUT_NUMBERS)
BYTES_TRANSFER = struct.Struct("@" + "".join(kind._type_ for _, kind in Transfer._fields_[:-1]))
"""`struct transfer` of bytes, whose header, the last member, C makes."""
NOTHING_DONE = (0,) * 8
"""What C maintains of it, before the header."""
_TENSOR_TRANSFER = struct.Struct(f"{BYTES_TRANSFER.format}{Transfer.header.size}s")

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class RingTransfer(Work):
    """A transfer of one tensor over a ring link."""

    link: RingLink
    flow: Flow
    """The direction of the transfer."""
    tensor: torch.Tensor | None
    """None once the caller's stream waits for the transfer, or it is complete: then its memory may
    be used again in the order of that stream, long before the device has come there."""
    state: Any
    """The `struct transfer` of C."""
    event: Event | None = None
    """The end of the caller's earlier work; None while it may go to the same stream."""
    begun_at: float = field(default_factory=time.monotonic)
    error: LinkError | None = None
    _end_count: int | None = None
    _is_completed: bool = False

    @property
    def header(self) -> bytes:
        return bytes(self.state.header)

    @property
    def end_count(self) -> int | None:
        """The flow's entry count after the transfer's last entry; None until that is enqueued."""
        if self._end_count is None and self.state.progress == _ENQUEUED:
            self.flow.acquire()
            self._end_count = self.state.count
        return self._end_count

    @property
    def has_begun(self) -> bool:
        """True if streams or a carrier may copy from or to the tensor."""
        state = self.state
        return state.offset > 0 or state.claimed > 0 or state.progress in (_ENQUEUED, _FAILED)

    @property
    def has_ended(self) -> bool:
        """True if it is complete or has failed. Requests no progress."""
        return self.error is not None or (self.end_count is not None and self.is_completed())

    def follow(self, event: Event) -> None:
        """Have the transfer follow an event, instead of what its caller's stream was given."""
        self.event = event
        self.state.event, self.state.after_caller = event.handle, False

    def is_completed(self) -> bool:
        """Stays true, also after the link is closed."""
        if self._is_completed or self.error is not None:
            return True
        if self.end_count is None:
            self.link.request_progress()
            return False
        self._is_completed = self.flow.has_completed(
            self.end_count, consumed=self.state.completes_at_receiver
        )
        return self._is_completed

    def wait(self) -> None:
        """Make the current stream wait for the transfer.

        Blocks the calling thread only until the peer has enqueued its side.
        """
        if self.end_count is None and self.error is None:
            self.link.progress_until_enqueued(self)
        if self.error is not None:
            raise self.error
        assert self.end_count is not None
        current = self.flow.device.current_stream()
        state = self.state
        is_in_order = state.on_caller_stream and current.key == state.caller_stream
        if not is_in_order and not self.is_completed():
            consumed = state.completes_at_receiver
            self.link.wait_value(
                current, self.flow.completed_word(self.end_count, consumed=consumed)
            )
        # On a host device the thread has waited: check that no failure has unblocked it.
        if not self.is_completed():
            self.link.check()
        if self.error is not None:
            raise self.error
        self.tensor = None


def new_transfer(
    link: RingLink,
    flow: Flow,
    tensor: torch.Tensor,
    caller_stream: int,
    event: Event | None,
    tag: int,
) -> RingTransfer:
    """A transfer of which nothing is enqueued yet. Positional: keywords cost a microsecond."""
    header = unnumbered_header(tensor.dtype, tensor.shape)
    state, handle = Transfer(), 0 if event is None else event.handle
    given = flow.address, tensor.data_ptr(), tensor.nbytes, caller_stream, handle, tag
    after_caller = event is None
    try:
        _TENSOR_TRANSFER.pack_into(
            state, 0, *given, after_caller, _UNNUMBERED, *NOTHING_DONE, header
        )
    except struct.error as error:
        raise ValueError(f"tag {tag!r} must be an integer between 0 and 4294967295") from error
    return RingTransfer(link, flow, tensor, state, event)


class RingLink(Link):
    """A link over a ring; no thread is between the two devices.

    `send` and `recv` enqueue copies on streams and return. What cannot be enqueued yet, because the
    ring is full or the peer has not sent, is enqueued by the next call, by `wait()`, by a carrier's
    threads where they may (flow.h), or by the monitor, which also checks deadlines and the peer,
    and rests while the link is idle.

    On failure the error flag is set before the streams that wait for the peer are unblocked: they
    then copy garbage, and a caller that synchronizes the device and calls `check()` never uses it.
    """

    def __init__(self, description: LinkDescription, options: RingOptions, ends: RingEnds) -> None:
        """Owns the ends from here on, also on failure."""
        self._ends, self.transport = ends, options.transport
        try:
            self._out = Flow(options, ends, is_outgoing=True)
            self._in = Flow(options, ends, is_outgoing=False)
            if options.device.notifies:
                ends.drive(self._out.address, self._in.address)
        except BaseException:
            ends.close()
            raise
        # From here on this rank's record asks for its state, in another thread.
        super().__init__(description)
        self._lock = threading.Lock()
        """Guards the flows."""
        self._device = options.device
        self._ring_bytes = options.ring_bytes
        self._is_requested = False
        """True from a request of progress until the monitor makes it."""
        self._is_polled = False
        """The same, of a request without a head start."""
        self._is_armed = False
        """True while the peer's next ring wakes the monitor, and only after that ring is there
        anything more for it to enqueue. Written with the lock, or by the monitor."""
        self._is_asleep = False
        """True while the monitor does not look at the link until progress is requested."""
        self._last_busy = time.monotonic()
        self._held_since: tuple[Any, float] | None = None
        """While the monitor finds the lock held: what had been enqueued, and since when."""
        self._retry_seconds = _HEAD_START_SECONDS
        self._waiters = 0
        """Callers in `wait()`, which make progress themselves."""
        self._blocked: list[None] = []
        """A counter of callers in `wait_value`: a list, because `+= 1` is not atomic without a lock
        and a list's `append` and `pop` are."""
        self.on_progress: Callable[[], None] | None = None
        """Called in the monitor, where no caller waits, after it has looked at the link. It may not
        block."""
        self._closing = threading.Lock()
        self._process = os.getpid()
        """The process that may close the link: a forked child leaves its parent's `with` too."""
        call_in_children(self, RingLink.break_in_fork)
        calls_driver = not options.device.has_host_tensors
        self._watch = Watch(self._check, self._fail_watch, calls_driver=calls_driver)
        self._deadline_watch = self._watch
        """Where `_check` may block in a call of the driver, another that goes on meanwhile."""
        if calls_driver:
            self._deadline_watch = Watch(self._check_deadline, self._fail_watch)
        try:
            for watch in {self._watch, self._deadline_watch}:
                watch.start()
            self._watch.add(ends.event, self._handle_event)
            self._watch.check_at(self._last_busy)
            if calls_driver:
                self._deadline_watch.check_at(self._last_busy)
        except BaseException:
            for watch in {self._watch, self._deadline_watch}:
                watch.close()
            ends.close()
            raise

    def send(self, tensor: torch.Tensor, *, tag: int = 0) -> Work:
        self.check()
        self._require_carried(tensor)
        source = sendable(tensor)
        stream = self._device.current_stream()
        if self._is_asleep:
            # Before the driver is called, which may block: the monitor has to watch the lock.
            self._request()
        # Without the lock: it may block on a stream that is full and waits for the peer.
        may_use_caller_stream = self._out.is_small(source.nbytes) and stream.is_current_device()
        event = None if may_use_caller_stream else self._device.record_event()
        with self._lock:
            self._require_open()
            transfer = new_transfer(self, self._out, source, stream.key, event, tag)
            self._count(source.nbytes, is_receive=False)
            self._out.begin(transfer)
            self._enqueue(sender=stream)
            if transfer.event is None and transfer.end_count is None:
                transfer.follow(self._device.record_event())
            self._release_completed()
        if self._is_asleep or transfer.end_count is None:
            self._request()
        self._record(source, transfer, is_receive=False)
        return transfer

    def recv(self, tensor: torch.Tensor, *, tag: int = 0) -> Work:
        self.check()
        self._require_carried(tensor)
        require_contiguous(tensor)
        stream, event = self._device.current_stream(), self._device.record_event()
        nbytes = tensor.nbytes
        with self._lock:
            self._require_open()
            transfer = new_transfer(self, self._in, tensor.detach(), stream.key, event, tag)
            self._count(nbytes, is_receive=True)
            if self._in.is_small(nbytes):
                # Leave it to the caller's `wait`, which may enqueue it on the caller's stream.
                self._enqueue()
                self._in.begin(transfer)
                self._is_armed = False
            else:
                self._in.begin(transfer)
                self._enqueue()
            self._release_completed()
        # For a small message leave the monitor alone: a caller that waits at once is faster.
        is_large = nbytes > self._ring_bytes // 2
        if self._is_asleep or (is_large and transfer.end_count is None):
            self._request()
        self._record(tensor, transfer, is_receive=True)
        return transfer

    def check(self) -> None:
        if self._broken is None and not self._closed and self._ends.peer.has_failed:
            with self._lock:
                if self._broken is None:
                    self._fail(self._peer_error())
        if self._broken is not None:
            raise self._broken

    def count_from_here(self) -> None:
        super().count_from_here()
        with self._lock:
            self._out.number_from_0()
            self._in.number_from_0()

    def close(self) -> None:
        # Another thread may be closing it, or what a signal handler has interrupted.
        if os.getpid() != self._process or not self._closing.acquire(blocking=False):
            return
        try:
            if not self._closed:
                self._close()
        finally:
            self._closing.release()

    def _close(self) -> None:
        self._drain_sends()
        self._closed = True
        error = self._broken or self.failure(
            "the link was closed while a transfer was under way",
            expected="every transfer waited for",
            remedy="close it later",
        )
        # The holder may be what the handler of a signal, in which this runs, has interrupted: it
        # goes on with the memory after this.
        is_free = self._end(error, self._abort_transfers, seconds=_JOIN_SECONDS)
        self._ends.local.close()
        self._ends.peer.ring()
        is_free &= self._has_no_users()
        if is_free and self._device.synchronize(_SYNCHRONIZE_SECONDS):
            # Until then a carrier may access their tensors.
            self._ends.close()
            self._out.aborted.clear()
            self._in.aborted.clear()
        else:
            # Never unmap what a device may still use.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            _log.warning(
                "%s over %s: work of the device or a wait that uses the link's memory has not "
                "ended in time after the link was closed; the memory goes with the process",
                self.description,
                self.transport,
            )

    def _has_no_users(self) -> bool:
        """Wait until no thread reads the memory: the monitor, or one in `wait()`."""
        deadline = time.monotonic() + _JOIN_SECONDS
        has_returned = self._watch.close(_JOIN_SECONDS)
        has_returned &= self._deadline_watch.close(_JOIN_SECONDS)
        while (in_use := self._waiters or self._blocked) and time.monotonic() < deadline:
            time.sleep(_SPIN_SECONDS)
        return has_returned and not in_use

    def lock_for_exchange(self) -> CurrentStream | None:
        """Lock the link for messages of several links at once (ring_exchange.py).

        Returns the caller's stream; None, without the lock, if the link cannot take part.
        """
        stream = self._device.current_stream()
        if not stream.is_current_device():
            return None
        if self._is_asleep:
            self._request()
        self._lock.acquire()
        if self._broken is None and not self._closed:
            return stream
        self._lock.release()
        return None

    def unlock(self) -> None:
        self._lock.release()

    def count_message(self, nbytes: int, *, is_receive: bool) -> Flow:
        """Add a message of an exchange to the counters. Call with the lock.

        Returns its direction. The caller has checked that the memory is on this link's device.
        """
        self._count(nbytes, is_receive=is_receive)
        return self._in if is_receive else self._out

    def add_transfer(self, tensor: torch.Tensor, begun: Any, *, is_receive: bool) -> RingTransfer:
        """The handle of a message that an exchange has begun. Call with the lock."""
        flow = self._in if is_receive else self._out
        transfer = RingTransfer(self, flow, tensor, begun)
        flow.waiting.append(transfer)
        flow.take_enqueued()
        self._is_armed = False
        if transfer.end_count is None:
            # It goes on without the caller.
            transfer.follow(self._device.record_event())
        return transfer

    def handle_driver_failure(self, transfer: RingTransfer) -> None:
        """Fail the link. Call with the lock, after all transfers of the exchange are updated."""
        if self._broken is None:
            error = str(transfer.flow.driver_error(transfer))
            self._fail(self._transfer_error(error, _DRIVER_REMEDY))

    @property
    def peer_has_failed(self) -> bool:
        """True if what has been enqueued must not be trusted."""
        return self._ends.peer.has_failed

    def end_exchange(self, *, caller_waits: bool) -> None:
        """Have the rest of an exchange enqueued. Call with the lock.

        `caller_waits`: the caller will wait, and make progress on one link at a time. Meanwhile a
        peer may wait for another: for what waits for room here, or for room in its own ring.
        """
        for flow in (self._out, self._in):
            if flow.waiting:
                flow.take_enqueued()
        receives = self._in.waiting
        # While the caller waits, as after `recv`.
        has_receives = bool(receives) and (
            not caller_waits
            or sum(transfer.state.nbytes for transfer in receives) > self._ring_bytes // 2
        )
        if self._is_asleep or self._out.waiting or has_receives:
            self._request()
        self._release_completed()

    def state(self) -> LinkState | None:
        state = super().state()
        if state is None:
            return None
        rails = self._ends.rails()
        state = replace(state, rails=rails.states, retransmitted=rails.retransmitted)
        if self._broken is not None:
            return state
        sends = self._out.pending()
        pending = sends + self._in.pending()
        if not pending:
            return state
        oldest = min(pending, key=lambda transfer: transfer.begun_at)
        verb = "receive" if oldest.flow is self._in else "send"
        return replace(
            state,
            queued=len(pending),
            sends_queued=sum(self._is_here(transfer) for transfer in sends),
            oldest=f"{verb} message {Header.unpack(oldest.header).sequence}",
            oldest_seconds=round(time.monotonic() - oldest.begun_at, 3),
        )

    def _is_here(self, transfer: RingTransfer) -> bool:
        """Whether what is sent may wait for this rank: for its ring, or on a GPU for a stream."""
        is_cpu = self.device is not None and self.device.type == "cpu"
        return not is_cpu or transfer.end_count is None

    def wait_value(self, stream: CurrentStream, word: Word) -> None:
        """Make a caller's stream wait for a word of the link."""
        # Before `_require_open`: `close` reads the counter after it has set `_closed`.
        self._blocked.append(None)
        try:
            self._require_open()
            stream.wait_value(word)
        finally:
            self._blocked.pop()

    def request_progress(self) -> None:
        """Have the monitor make progress on a transfer that is polled, not waited for."""
        if not (self._is_armed or self._is_polled or self._waiters):
            self._is_polled = True
            self._wake()
            self._watch.check_at(0.0)

    def _request(self) -> None:
        """Have the monitor make progress: something waits, and maybe no caller will."""
        if not self._is_requested:
            self._is_requested = True
            self._wake()
            # Give a caller that waits immediately a head start over the monitor's thread.
            self._watch.check_at(time.monotonic() + _HEAD_START_SECONDS)

    def _wake(self) -> None:
        if self._is_asleep and self._deadline_watch is not self._watch:
            self._deadline_watch.check_at(time.monotonic() + WATCH_SECONDS)
        self._is_asleep = False

    def progress_until_enqueued(self, transfer: RingTransfer) -> None:
        """Make progress until all of a transfer is enqueued, or it has failed."""
        # It also gives the calling thread a context, before the driver is called.
        stream = self._device.current_stream()
        with self._lock:
            self._waiters += 1
        try:
            with self.timed_wait():
                self._progress(transfer, receiver=stream if transfer.flow is self._in else None)
        finally:
            with self._lock:
                self._waiters -= 1
                if self._out.waiting or self._in.waiting:
                    self._request()

    def _progress(self, transfer: RingTransfer, *, receiver: CurrentStream | None) -> None:
        spin_until = time.monotonic() + _SPIN_SECONDS
        while True:
            bell = self._ends.local.doorbell
            with self._lock:
                self._enqueue(receiver=receiver, awaited=transfer)
            if transfer.end_count is not None or transfer.error is not None:
                return
            # Spin first: a wake-up costs more.
            spin_seconds = max(0.0, spin_until - time.monotonic())
            self._ends.local.sleep(bell, WATCH_SECONDS, spin_seconds=spin_seconds)
            if time.monotonic() > spin_until:
                with self._lock:
                    self._fail_if_stalled()

    def spin_for_entry(self, seconds: float) -> None:
        """Poll until the peer has posted an entry more than have been received, or time is over.

        By any thread, without a lock. A message whose receive begins only then gets no handle.
        """
        self._blocked.append(None)
        try:
            if not self._closed:
                posted = self._ends.incoming.address + RingDirection.posted.offset
                native().host_wait_word(posted, self._in.count + 1, int(seconds * 1e6), 0)
        finally:
            self._blocked.pop()

    def await_news(
        self,
        transfer: RingTransfer,
        seconds: float,
        *,
        spin_seconds: float = 0.0,
        other: RingTransfer | None = None,
    ) -> bool:
        """Make progress once, and sleep while there is nothing to do for a transfer.

        For links of tensors in host memory, by any thread. Sleeps until there is something to do
        for a message, `transfer` or `other` has ended, or `seconds` are over: call it again. It
        polls the first `spin_seconds`; with 0 `seconds` it does not wait. The monitor leaves
        progress to the caller meanwhile.

        Args:
            other: a transfer of the other direction, which may be needed before `transfer` can end.

        Returns:
            Whether `transfer` has ended, as far as is known without looking again.
        """
        caller, word = self._device.current_stream(), None
        is_send = transfer.flow is self._out
        with self._lock:
            if transfer.has_ended or self._closed:
                return transfer.has_ended
            bell = self._ends.local.doorbell
            # The peer may ring between this and the sleep, which then does not begin.
            sender, receiver = (caller, None) if is_send else (None, caller)
            self._enqueue(sender=sender, receiver=receiver, awaited=transfer)
            if seconds and not spin_seconds:
                self._fail_if_stalled()
            if transfer.has_ended:
                return True
            if not seconds or (other is not None and other.has_ended):
                return False
            # The peer may take it only once this end has gone on with what it sends itself.
            needs_other = other is not None and transfer.state.completes_at_receiver
            if transfer.end_count is not None and not needs_other:
                # Streams and carriers do the rest, without any CPU: it ends with this word.
                consumed = transfer.state.completes_at_receiver
                word = transfer.flow.completed_word(transfer.end_count, consumed=consumed)
                self._blocked.append(None)
                if self._out.waiting or self._in.waiting:
                    self._request()
            else:
                self._waiters += 1
                # Nothing rings for the end of what is enqueued.
                if transfer.end_count is not None or (
                    other is not None and other.end_count is not None
                ):
                    seconds = min(seconds, _COPY_SECONDS)
        try:
            if word is None:
                self._ends.local.sleep(bell, seconds, spin_seconds=spin_seconds)
                return False
            spin_microseconds, milliseconds = int(spin_seconds * 1e6), int(seconds * 1e3)
            wait = native().host_wait_word
            wait(word.address, word.value, spin_microseconds, milliseconds)
            return transfer.has_ended
        finally:
            if word is not None:
                self._blocked.pop()
            else:
                with self._lock:
                    self._waiters -= 1

    def _enqueue(
        self,
        *,
        sender: CurrentStream | None = None,
        receiver: CurrentStream | None = None,
        awaited: RingTransfer | None = None,
    ) -> None:
        """Enqueue as much as possible. Call with the lock.

        `sender`, `receiver`: the stream of a caller in `send`, or in `awaited.wait`.
        """
        if self._broken is not None:
            self._abort_transfers(self._broken)
            return
        try:
            self._out.enqueue(sender)
            self._in.enqueue(receiver, awaited=awaited)
        except UnexpectedEntry as refusal:
            self._fail(self._refused(self._in.waiting[0], str(refusal)))
        except RuntimeError as error:
            self._fail(self._transfer_error(str(error), _DRIVER_REMEDY))

    def _handle_event(self) -> None:
        """In the monitor, after the peer has rung while armed."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._ends.event)
        self._is_armed = False
        if not self._waiters:
            self._check()

    def _check(self) -> None:
        """In the monitor: make progress if no caller does, check deadlines and the peer.

        ============  ============================================  ===============================
        state         when                                          the monitor
        ============  ============================================  ===============================
        asleep        no message under way for _IDLE_SECONDS        waits for a request of progress
        watching      every message is enqueued                     checks each WATCH_SECONDS
        head start    after a request of progress, but for one      waits _HEAD_START_SECONDS: a
                      of a caller that polls                        caller may come to wait
        caller waits  `_waiters` > 0                                as watching: the caller makes
                                                                    progress
        progressing   a message waits to be enqueued, no caller     enqueues whenever the doorbell
                                                                    rings, and each WATCH_SECONDS
        held          another thread holds the lock                 tries again soon; after the
                                                                    timeout it is blocked in the
                                                                    driver (_fail_if_held)
        ============  ============================================  ===============================
        """
        self._device.use()
        now = time.monotonic()
        if self._is_requested or self._is_polled:
            self._last_busy = now
        # Before the lock: a message that comes after it then requests progress.
        self._is_asleep = now - self._last_busy > _IDLE_SECONDS
        bell = self._ends.local.doorbell
        # Never wait for it: its holder may be blocked in a call of the driver.
        if not self._lock.acquire(blocking=False):
            self._is_asleep = False
            self._fail_if_held()
            self._watch.check_at(now + self._retry_seconds)
            self._retry_seconds = min(2 * self._retry_seconds, WATCH_SECONDS)
            return
        try:
            self._enqueue()
            self._fail_if_stalled()
            self._is_armed = not self._waiters and bool(self._out.waiting or self._in.waiting)
            # Last: a caller that polls meanwhile has nothing to request.
            self._is_requested = self._is_polled = False
            is_idle = self._is_idle()
        finally:
            self._lock.release()
        self._held_since, self._retry_seconds = None, _HEAD_START_SECONDS
        if not is_idle:
            self._last_busy = now
            self._is_asleep = False
        if self._is_armed and not self._ends.local.arm(bell):
            self._is_armed = False
            self._watch.check_at(now)
        if not self._is_asleep:
            self._watch.check_at(now + WATCH_SECONDS)
            self._deadline_watch.check_at(now + WATCH_SECONDS)
        if self.on_progress is not None and not self._waiters:
            self.on_progress()

    def _check_deadline(self) -> None:
        """In the monitor, where `_check` may block in the driver: fail a link that is overdue.

        It unblocks the link's streams, and with them what is blocked on the same device.
        """
        if not self._is_asleep:
            self._deadline_watch.check_at(time.monotonic() + WATCH_SECONDS)
        if not self._lock.acquire(blocking=False):
            self._fail_if_held()
            return
        try:
            self._held_since = None
            self._fail_if_overdue()
        finally:
            self._lock.release()

    def _fail_if_held(self) -> None:
        """Fail the link if the lock has been held for the timeout, and nothing has moved.

        Its holder is blocked in a call of the driver, on a stream that is full and waits for a dead
        peer. Call without the lock, each time that it is found held.
        """
        now, enqueued = time.monotonic(), (self._out.count, self._in.count)
        if self._held_since is None or self._held_since[0] != enqueued:
            self._held_since = enqueued, now
        elif now - self._held_since[1] > self.description.timeout:
            if self._broken is None:
                seconds = f"{self.description.timeout:g} s"
                what = f"a call of the device's driver has not returned for {seconds}"
                self._set_error_flag(self._transfer_error(what))
            self._unblock_streams()

    def _fail_watch(self, error: Exception) -> None:
        """In the monitor, which has failed at this link and calls it no more."""
        what = f"its watch failed ({type(error).__name__}: {error})"
        failure = self.failure(what, expected="none", remedy="see the traceback in this rank's log")
        self._end(failure, self._fail, seconds=WATCH_SECONDS)

    def _end(self, error: LinkError, end: Callable[[LinkError], None], *, seconds: float) -> bool:
        """Call `end` with the lock. Returns False if it is still held after `seconds`.

        Its holder then learns of the error with its next message.
        """
        if not self._lock.acquire(timeout=seconds):
            self._set_error_flag(error)
            self._unblock_streams()
            return False
        try:
            end(error)
        finally:
            self._lock.release()
        return True

    def _fail_if_stalled(self) -> None:
        """Fail the link if a stream or the peer has, or a transfer is overdue. Call with the lock.

        An idle link does not fail.
        """
        self._release_completed()
        self._fail_if_overdue()
        if self._broken is not None or self._is_idle():
            return
        if (self._ends.peer.is_closed or self._ends.peer_has_ended()) and self._needs_peer():
            what = f"rank {self.description.peer} has ended or closed the link"
            self._fail(self._transfer_error(what))

    def _fail_if_overdue(self) -> None:
        """The same, but for a peer that has ended: without any call of the driver."""
        if self._broken is not None or self._is_idle():
            return
        if self._ends.peer.has_failed:
            self._fail(self._peer_error())
        elif error := self._in.stream_error() or self._out.stream_error():
            self._fail(self._transfer_error(error))
        elif any(flow.is_overdue(self.description.timeout) for flow in (self._in, self._out)):
            what = f"nothing moved for {self.description.timeout:g} s"
            self._fail(self._transfer_error(what, remedy="see what the peer's log says"))

    def _needs_peer(self) -> bool:
        """Returns whether a transfer depends on the peer. Call after the peer has ended."""
        # Handle what the peer did before it ended.
        self._enqueue()
        flows = self._out, self._in
        return any(flow.waiting or flow.waits_for_peer() for flow in flows)

    def _drain_sends(self) -> None:
        """Wait until the peer has consumed what was sent, or has ended.

        Up to the timeout after the last movement: what moves arrives, however slowly.
        """
        seen, deadline = None, 0.0
        while self._broken is None:
            bell = self._ends.local.doorbell
            if not self._lock.acquire(timeout=_JOIN_SECONDS):
                return
            try:
                self._enqueue()
            finally:
                self._lock.release()
            moved = self._out.count, self._ends.outgoing.consumed
            if moved != seen:
                seen, deadline = moved, time.monotonic() + self.description.timeout
            taken = self._out.has_completed(self._out.count, consumed=True)
            if (taken and not self._out.waiting) or self._ends.peer.is_closed:
                return
            if self._ends.peer_has_ended() or self._ends.peer.has_failed:
                return
            if time.monotonic() > deadline:
                return
            self._ends.local.sleep(bell, 0.002)

    def _refused(self, transfer: RingTransfer, difference: str) -> LinkError:
        self._ends.local.fail(f"rank {self.description.rank} refused a message: {difference}")
        expected = Header.unpack(transfer.header)
        return self.failure(
            f"message {expected.sequence} has {difference}",
            expected=f"{expected.dtype} of shape {expected.shape}",
            remedy=DIFFERENCE_REMEDY,
        )

    def _is_idle(self) -> bool:
        """Returns whether every message is complete."""
        return self._in.is_idle() and self._out.is_idle()

    def _peer_error(self) -> LinkError:
        """The error with which the peer has failed."""
        return self._transfer_error(self._ends.peer.fault or "")

    def _transfer_error(self, what: str, remedy: str | None = None) -> LinkError:
        """An error that says what the first transfer that is not complete expected."""
        peer, expected = self.description.peer, "an open link"
        for flow, verb in (self._out, "taken by"), (self._in, "from"):
            if packed := flow.first_header():
                header = Header.unpack(packed)
                expected = f"{header.dtype} of shape {header.shape} {verb} rank {peer}"
        remedy = remedy or f"see the log of rank {peer}"
        return self.failure(what, expected=expected, remedy=remedy)

    def _fail(self, error: LinkError) -> None:
        """Fail the link and its transfers. Call with the lock.

        Streams that wait for the peer are unblocked after the error flag is set.
        """
        self._set_error_flag(error)
        self._abort_transfers(error)

    def _set_error_flag(self, error: LinkError) -> None:
        """Have later calls raise an error, and notify the peer. May be called without the lock."""
        if self._broken is None:
            self._recorder.report_failure(str(error))
            peer = self.description.peer
            self._recorder.add_incident("link failed", str(error), peer=peer)
        self._broken = error
        if not self._ends.local.has_failed:
            self._ends.local.fail(f"rank {self.description.rank} aborted the link: {error}")
        self._ends.peer.ring()

    def _abort_transfers(self, error: LinkError) -> None:
        for flow in (self._out, self._in):
            for transfer in flow.transfers():
                if not transfer.is_completed():
                    transfer.error = error
            flow.abort()
        self._unblock_streams()

    def _unblock_streams(self) -> None:
        blocked = [
            flow for flow in (self._out, self._in) if flow.waits_for_peer() or flow.stream_error()
        ]
        if blocked and not self._ends.local.has_failed:
            # Set the flag first: the peer reads these words too, and must not trust them.
            self._ends.local.fail(f"rank {self.description.rank} closed the link")
        for flow in blocked:
            flow.unblock()

    def break_in_fork(self) -> None:
        """Fail whatever a forked child asks of its parent's link.

        It shares the memory, and would write the parent's messages over. Change nothing in that,
        and keep the transfers: freeing a GPU's event ends a forked child.
        """
        self._lock = threading.Lock()  # its holder may be a thread that the child does not have
        self._broken = error = self.failure(
            "it belongs to the process that this one was forked from",
            expected="a link of one's own",
            remedy="open it after the fork, or have the parent send and receive",
        )
        for flow in (self._out, self._in):
            for transfer in flow.transfers():
                transfer.error = error

    def _release_completed(self) -> None:
        for flow in (self._out, self._in):
            if flow.in_flight:
                flow.release_completed()
