"""A link over a ring that two devices fill and empty (docs/ring.md).

`send` and `recv` enqueue copies on streams and return. What cannot be enqueued yet (the ring is
full, or the peer has not sent) is enqueued by the next call, by `wait()`, or by the link's thread,
which also checks deadlines and the peer, and sleeps while the link is idle.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from hetero.device.device import CurrentStream, Word
from hetero.link.base import (
    LinkDescription,
    Work,
    require_contiguous,
    sendable,
    start_thread,
)
from hetero.link.flow import Flow, UnexpectedEntry
from hetero.link.ring_failure import WATCH_SECONDS, RingLinkBase
from hetero.link.ring_options import RingOptions
from hetero.link.ring_transfer import RingEnds, RingTransfer, new_transfer
from hetero.native.structures import Transfer
from hetero.startup.process import call_in_children

_IDLE_SECONDS = 1.0
_JOIN_SECONDS = 5.0
_SYNCHRONIZE_SECONDS = 10.0
_SPIN_SECONDS = 500e-6
_HEAD_START_SECONDS = 200e-6
_DRIVER_REMEDY = "see the log of the GPU driver"

_log = logging.getLogger(__name__)


class RingLink(RingLinkBase):
    """A link over a ring; no thread is between the two devices."""

    def __init__(self, description: LinkDescription, options: RingOptions, ends: RingEnds) -> None:
        """Owns the ends from here on, also on failure."""
        try:
            outgoing = Flow(options, ends, is_outgoing=True)
            incoming = Flow(options, ends, is_outgoing=False)
        except BaseException:
            ends.close()
            raise
        super().__init__(description, ends=ends, outgoing=outgoing, incoming=incoming)
        self.transport = options.transport
        self._device = options.device
        self._ring_bytes = options.ring_bytes
        self._progress_requested = threading.Event()
        """Wakes the link's thread: something waits, and maybe no caller will make progress."""
        self._is_asleep = False
        """Whether the link's thread sleeps until progress is requested."""
        self._waiters = 0
        """Callers in `wait()`, which make progress themselves."""
        self._blocked: list[int] = []
        """An item for each caller in `wait()` for a word, when all of its transfer is enqueued."""
        self._closing = threading.Lock()
        self._process = os.getpid()
        """A fork that closes the link, as by its parent's `with`, is no end of it."""
        call_in_children(self, RingLink.break_in_fork)
        self._thread = threading.Thread(
            target=self._run,
            name=f"{self.transport} {description.rank}-{description.peer} watch",
            daemon=True,
        )
        try:
            start_thread(self._thread)
        except BaseException:
            ends.close()
            raise

    def send(self, tensor: torch.Tensor, *, tag: int = 0) -> Work:
        self.check()
        self._require_carried(tensor)
        source = sendable(tensor)
        stream = self._device.current_stream()
        if self._is_asleep:
            self._progress_requested.set()
        # Without the lock: it may block on a stream that is full and waits for the peer.
        may_use_caller_stream = self._out.is_small(source.nbytes) and stream.is_current_device()
        event = None if may_use_caller_stream else self._device.record_event()
        with self._lock:
            self._require_open()
            transfer = new_transfer(self, self._out, source, stream.key, event, tag)
            self._count(source.nbytes, is_receive=False)
            self._out.waiting.append(transfer)
            self._enqueue(sender=stream)
            if transfer.event is None and transfer.end_count is None:
                transfer.follow(self._device.record_event())
            self._release_completed()
        if transfer.end_count is None:
            self._progress_requested.set()
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
                self._in.waiting.append(transfer)
            else:
                self._in.waiting.append(transfer)
                self._enqueue()
            self._release_completed()
        # For a small message leave the thread asleep: a caller that waits at once is faster.
        is_large = nbytes > self._ring_bytes // 2
        if self._is_asleep or (is_large and transfer.end_count is None):
            self._progress_requested.set()
        return transfer

    def count_from_here(self) -> None:
        super().count_from_here()
        with self._lock:
            self._out.number_from_0()
            self._in.number_from_0()

    def lock_for_exchange(
        self, started: Sequence[RingTransfer] | None = None
    ) -> CurrentStream | None:
        """Lock the link for messages of several links at once (ring_exchange.py).

        `started`: the messages, if they have been started before; None for new ones.
        Returns the caller's stream; None, without the lock, if the link cannot take part.
        """
        stream = self._device.current_stream()
        if not stream.is_current_device():
            return None
        self._lock.acquire()
        if started is None:
            is_next = not (self._out.waiting or self._in.waiting)
        else:
            is_next = self._out.is_next(started) and self._in.is_next(started)
        if is_next and self._broken is None and not self._closed:
            return stream
        self._lock.release()
        return None

    def unlock(self) -> None:
        self._lock.release()

    def flow_for(self, nbytes: int, *, is_receive: bool) -> Flow:
        """Where an exchange enqueues a message, which this counts. Call with the lock.

        Whoever exchanges has made sure that the memory is of this link's device.
        """
        self._count(nbytes, is_receive=is_receive)
        return self._in if is_receive else self._out

    def add_transfer(self, tensor: torch.Tensor, begun: Any, *, is_receive: bool) -> RingTransfer:
        """The handle of a message that an exchange has begun. Call with the lock."""
        flow = self._in if is_receive else self._out
        transfer = RingTransfer(self, flow, tensor, Transfer.from_buffer_copy(begun))
        flow.waiting.append(transfer)
        flow.take_enqueued()
        if transfer.end_count is None:
            # It goes on without the caller.
            transfer.follow(self._device.record_event())
        return transfer

    def handle_driver_failure(self, transfer: RingTransfer) -> None:
        """Break the link. Call with the lock, after updating all transfers of the exchange."""
        if self._broken is None:
            self._fail(str(transfer.flow.driver_error(transfer)), _DRIVER_REMEDY)

    @property
    def peer_has_failed(self) -> bool:
        """Whether the peer has, so that what is enqueued must not be trusted."""
        return self._ends.peer.has_failed

    def end_exchange(self, *, caller_waits: bool) -> None:
        """Have the rest of an exchange enqueued. Call with the lock.

        `caller_waits`: the caller will wait, and make progress.
        """
        waiting = [flow for flow in (self._out, self._in) if flow.waiting]
        is_left = [flow.take_enqueued() is not None for flow in waiting]
        if self._is_asleep or (not caller_waits and any(is_left)):
            self._progress_requested.set()
        self._release_completed()

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
        with self._lock:
            error = self._broken or self.failure(
                "the link was closed while a transfer was under way",
                expected="every transfer waited for",
                remedy="close it later",
            )
            self._abort_transfers(error)
        self._ends.local.close()
        self._ends.peer.ring()
        self._progress_requested.set()
        if self._has_no_users() and self._device.synchronize(_SYNCHRONIZE_SECONDS):
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
        """Wait until no thread reads the memory: the link's own, or one in `wait()`."""
        deadline = time.monotonic() + _JOIN_SECONDS
        while (in_use := self._waiters or self._blocked or self._thread.is_alive()) and (
            time.monotonic() < deadline
        ):
            time.sleep(_SPIN_SECONDS)
        return not in_use

    def wait_value(self, stream: CurrentStream, word: Word) -> None:
        """Make a caller's stream wait for a word of the link."""
        # A list grows and shrinks atomically, so no message waits for the lock here. Grow it first:
        # `close` looks at it after it has set `_closed`.
        self._blocked.append(word.address)
        try:
            self._require_open()
            stream.wait_value(word)
        finally:
            self._blocked.pop()

    def request_progress(self) -> None:
        """Have the link's thread make progress on a transfer that is polled, not waited for."""
        if not self._progress_requested.is_set():
            self._progress_requested.set()

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
                    self._progress_requested.set()

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
                    self._check_progress()

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
            self._break(self._refused(self._in.waiting[0], str(refusal)))
            return
        except RuntimeError as error:
            self._fail(str(error), _DRIVER_REMEDY)

    def _run(self) -> None:
        """The link's thread: makes progress if no caller does, checks deadlines and the peer."""
        self._device.use()
        last_busy = time.monotonic()
        while not self._closed:
            # Before the lock: a message that comes after it then requests progress.
            self._is_asleep = time.monotonic() - last_busy > _IDLE_SECONDS
            bell = self._ends.local.doorbell
            with self._lock_or_unblock():
                self._enqueue()
                self._check_progress()
                waiting = bool(self._out.waiting or self._in.waiting)
                is_idle = self._is_idle()
            if not is_idle:
                last_busy = time.monotonic()
                self._is_asleep = False
            if waiting and not self._waiters:
                self._ends.local.sleep(bell, WATCH_SECONDS)
            elif self._progress_requested.wait(None if self._is_asleep else WATCH_SECONDS):
                last_busy = time.monotonic()
                self._progress_requested.clear()
                # Give a caller that waits immediately a head start over this thread.
                time.sleep(_HEAD_START_SECONDS)
