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
from hetero.link.header import Header
from hetero.link.ring import ahead
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
        in_flight = [*self._out.transfers(), *self._in.transfers()]
        if self._broken is not None or not in_flight:
            return
        peer = self.description.peer
        broken = self._in.broken() or self._out.broken()
        if self._ends.peer.has_failed:
            self._handle_fault()
        elif broken is not None:
            self._break(self._transfer_error(broken, remedy=f"see the log of rank {peer}"))
        elif any(time.monotonic() > t.deadline and not t.is_completed() for t in in_flight):
            timeout = self.description.timeout
            self._break(
                self._transfer_error(
                    f"nothing moved for {timeout:g} s", remedy="see what the peer's log says"
                )
            )
        elif (self._ends.peer.is_closed or self._ends.peer_has_ended()) and self._needs_peer():
            self._break(
                self._transfer_error(
                    f"rank {peer} has ended or closed the link",
                    remedy=f"see the log of rank {peer}",
                )
            )

    def _handle_fault(self) -> None:
        """Break the link because the peer has failed. Call with the lock."""
        fault = self._ends.peer.fault
        if self._broken is None and fault is not None:
            peer = self.description.peer
            self._break(self._transfer_error(fault, remedy=f"see the log of rank {peer}"))

    def _needs_peer(self) -> bool:
        """Whether a transfer depends on the peer. Call after the peer has ended."""
        # Handle what the peer did before it ended.
        self._enqueue()
        outgoing, incoming = self._ends.outgoing, self._ends.incoming
        stuck_out = ahead(self._out.awaited, outgoing.consumed) > 0 and bool(self._out.in_flight)
        stuck_in = ahead(self._in.awaited, incoming.produced) > 0 and bool(self._in.in_flight)
        return bool(self._out.waiting or self._in.waiting or stuck_out or stuck_in)

    def _refused(self, transfer: RingTransfer, difference: str) -> LinkError:
        self._ends.local.fail(f"rank {self.description.rank} refused a message: {difference}")
        expected = Header.unpack(transfer.header)
        return self.failure(
            f"message {transfer.sequence} has {difference}",
            expected=f"{expected.dtype} of shape {expected.shape}",
            remedy="start both sides with the same model, batch and parallel flags",
        )

    def _transfer_error(self, what: str, *, remedy: str) -> LinkError:
        waiting = [*self._in.transfers(), *self._out.transfers()]
        expected = "an open link"
        if waiting:
            verb = "from" if waiting[0].is_receive else "taken by"
            tensor = waiting[0].tensor
            peer = self.description.peer
            expected = f"{tensor.dtype} of shape {tuple(tensor.shape)} {verb} rank {peer}"
        return self.failure(what, expected=expected, remedy=remedy)

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
        outgoing, incoming = self._ends.outgoing, self._ends.incoming
        holds_out = ahead(self._out.awaited, outgoing.consumed) > 0
        holds_in = ahead(self._in.awaited, incoming.produced) > 0
        if (holds_out or holds_in) and not self._ends.local.has_failed:
            # Set the flag first: the peer reads these words too, and must not trust them.
            self._ends.local.fail(f"rank {self.description.rank} closed the link")
        if holds_out:
            outgoing.unblock_sender(self._out.awaited)
        if holds_in:
            incoming.unblock_receiver(self._in.awaited)

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
                self._set_error_flag(
                    self._transfer_error(
                        "a call of the device's driver has not returned for "
                        f"{self.description.timeout:g} s",
                        remedy=f"see the log of rank {self.description.peer}",
                    )
                )
            self._unblock_streams()
        try:
            yield
        finally:
            self._lock.release()

    def _release_completed(self) -> None:
        self._out.release_completed()
        self._in.release_completed()
