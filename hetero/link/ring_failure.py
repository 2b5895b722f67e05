"""Failure handling of a ring link.

On failure, set the error flag before unblocking the streams that wait for the peer: they then copy
garbage, and a caller that synchronizes the device and calls `check()` never uses it.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from hetero.errors import LinkError
from hetero.link.base import Link, LinkDescription
from hetero.link.flow import Flow
from hetero.link.header import DIFFERENCE_REMEDY, Header
from hetero.link.ring_transfer import RingEnds, RingTransfer

WATCH_SECONDS = 0.1


class RingLinkBase(Link):
    """A ring link's state, and how it detects, reports and handles failures."""

    def __init__(
        self, description: LinkDescription, *, ends: RingEnds, outgoing: Flow, incoming: Flow
    ) -> None:
        super().__init__(description)
        self._ends = ends
        self._out, self._in = outgoing, incoming
        self._lock = threading.Lock()
        """Guards the flows."""

    @abstractmethod
    def _enqueue(self) -> None:
        """Enqueue as much as possible. Call with the lock."""

    def check(self) -> None:
        if self._broken is None and not self._closed and self._ends.peer.has_failed:
            with self._lock:
                self._handle_fault()
        if self._broken is not None:
            raise self._broken

    def _check_progress(self) -> None:
        """Break the link if a transfer is overdue or the peer has ended. Call with the lock."""
        self._release_completed()
        if self._broken is not None or self._is_idle():
            return
        if self._ends.peer.has_failed:
            self._handle_fault()
        elif broken := self._in.broken() or self._out.broken():
            self._fail(broken)
        elif any(flow.is_overdue(self.description.timeout) for flow in (self._in, self._out)):
            what = f"nothing moved for {self.description.timeout:g} s"
            self._fail(what, remedy="see what the peer's log says")
        elif (self._ends.peer.is_closed or self._ends.peer_has_ended()) and self._needs_peer():
            self._fail(f"rank {self.description.peer} has ended or closed the link")

    def _handle_fault(self) -> None:
        """Break the link because the peer has failed. Call with the lock."""
        fault = self._ends.peer.fault
        if self._broken is None and fault is not None:
            self._fail(fault)

    def _needs_peer(self) -> bool:
        """Whether a transfer depends on the peer. Call after the peer has ended."""
        # Handle what the peer did before it ended.
        self._enqueue()
        flows = self._out, self._in
        return any(flow.waiting or flow.is_held() for flow in flows)

    def _drain_sends(self) -> None:
        """Wait until the peer has consumed what was sent, or has ended.

        Up to the timeout after the last movement: what moves arrives, however slowly.
        """
        seen, deadline = None, 0.0
        while self._broken is None:
            bell = self._ends.local.doorbell
            with self._lock:
                self._enqueue()
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
        """Whether no message is on its way."""
        return self._in.is_idle() and self._out.is_idle()

    def _transfer_error(self, what: str, remedy: str | None = None) -> LinkError:
        peer, expected = self.description.peer, "an open link"
        for flow, verb in (self._out, "taken by"), (self._in, "from"):
            if packed := flow.first_header():
                header = Header.unpack(packed)
                expected = f"{header.dtype} of shape {header.shape} {verb} rank {peer}"
        remedy = remedy or f"see the log of rank {peer}"
        return self.failure(what, expected=expected, remedy=remedy)

    def _fail(self, what: str, remedy: str | None = None) -> None:
        """Break the link with an error that says what the first transfer expected."""
        self._break(self._transfer_error(what, remedy))

    def _break(self, error: LinkError) -> None:
        """Set the error flag, notify the peer, and only then unblock what waits for it."""
        self._set_error_flag(error)
        self._abort_transfers(error)

    def _set_error_flag(self, error: LinkError) -> None:
        self._broken = error
        if not self._ends.local.has_failed:
            self._ends.local.fail(f"rank {self.description.rank} gave the link up: {error}"[:900])
        self._ends.peer.ring()

    def _abort_transfers(self, error: LinkError) -> None:
        for flow in (self._out, self._in):
            for transfer in flow.transfers():
                if not transfer.is_completed():
                    transfer.error = error
            flow.abort()
        self._unblock_streams()

    def _unblock_streams(self) -> None:
        held = [flow for flow in (self._out, self._in) if flow.is_held()]
        if held and not self._ends.local.has_failed:
            # Set the flag first: the peer reads these words too, and must not trust them.
            self._ends.local.fail(f"rank {self.description.rank} closed the link")
        for flow in held:
            flow.unblock()

    @contextmanager
    def _lock_or_unblock(self) -> Iterator[None]:
        """Take the lock in the link's thread.

        Its holder may be blocked in a call of the driver, on a stream that is full and waits for a
        dead peer. After the timeout, break the link and unblock its streams.
        """
        patience = self.description.timeout
        while not self._lock.acquire(timeout=patience):
            patience = WATCH_SECONDS
            if self._broken is None:
                seconds = f"{self.description.timeout:g} s"
                what = f"a call of the device's driver has not returned for {seconds}"
                self._set_error_flag(self._transfer_error(what))
            self._unblock_streams()
        try:
            yield
        finally:
            self._lock.release()

    def break_in_fork(self) -> None:
        """Fail whatever a forked child asks of its parent's link.

        It shares the memory, and would write the parent's messages over. Change nothing in that,
        and keep the transfers: freeing a GPU's event ends a forked child.
        """
        self._lock = threading.Lock()  # whoever held it does not exist in the child
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
