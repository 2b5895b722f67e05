"""Rail failover, and control messages of the peer, for links with a carrier.

Retransmit a lost rail's unfinished entries only when both ends have stopped it: until then a late
packet could overwrite a slot that is in use again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hetero.link.base import start_thread
from hetero.link.carrier import Carrier
from hetero.link.control import Control, PathsLost
from hetero.link.ring import EndState
from hetero.text import counted

_log = logging.getLogger(__name__)
# Longer than the thread's longest step: what it uses is freed after the join.
_JOIN_SECONDS = 15.0
_DRAIN_SECONDS = 10.0
"""How long after a peer's end what it sent before may arrive: the last credit, for one. A packet
that is lost five times in a row takes 6 s."""
_ANSWER_SECONDS = 5.0
"""How long a peer may take to say that it has stopped a rail too or, if that is why the rail ended,
that it has closed the link."""
_SLICE_SECONDS = 0.1


@dataclass
class RailState:
    """One rail, as far as both ends have reported."""

    name: str
    live: bool = True
    peer_has_stopped: bool = False
    loss: str = ""
    """Why it was lost."""
    is_reported: bool = False
    """Whether it is known to be lost, and not to have ended with the peer."""


class RailMonitor:
    """A thread that handles lost rails and messages of the peer."""

    def __init__(
        self,
        carrier: Carrier,
        control: Control,
        *,
        rails: Sequence[str],
        local: EndState,
        remote: EndState,
        name: str,
        peer: int,
    ) -> None:
        """An error flag set in `remote`, this end's copy of the peer's, breaks the link."""
        self._carrier = carrier
        self._control = control
        self._rails = [RailState(name) for name in rails]
        self._local, self._remote = local, remote
        self._name = name
        self._peer = peer
        self._sending = threading.Lock()
        self._peer_has_ended = self._stopping = False
        self._handlers = selectors.DefaultSelector()
        for descriptor in control.filenos():
            self._register(descriptor, partial(self._handle_control, descriptor))
        self._register(carrier.loss_fd, self._handle_losses)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Raises LinkError if it cannot. Call `close` in any case."""
        start_thread(self._thread)

    def peer_has_ended(self) -> bool:
        """Whether the peer has ended or closed the link. What it sent before has arrived."""
        return self._peer_has_ended

    def send_fault(self, reason: str) -> None:
        """Send this end's error to the peer. From any thread."""
        # If it fails the peer has ended, and has no link left to break.
        with contextlib.suppress(OSError):
            self._send({"fault": reason})

    def close(self) -> None:
        """End the thread and the control connections, which tells the peer that this end has."""
        self._stopping = True
        os.eventfd_write(self._carrier.loss_fd, 1)  # wakes the thread
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)
        self._control.close()
        self._handlers.close()

    def _register(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers.register(descriptor, selectors.EVENT_READ, handler)

    def _unregister(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._handlers.unregister(descriptor)

    def _run(self) -> None:
        while not self._stopping:
            ready = self._handlers.select()
            try:
                for key, _ in ready:
                    # An earlier handler may have unregistered it.
                    if key.fd in self._handlers.get_map() and not self._stopping:
                        key.data()
            except Exception as error:  # whatever it is, fail the link
                self._fail(f"the link's watch failed ({error})")
                _log.exception("%s: the watch failed", self._name)
                return

    def _handle_losses(self) -> None:
        while (loss := self._carrier.next_loss()) is not None:
            index, reason, may_have_ended = loss
            self._lose(index, reason, may_have_ended=may_have_ended)

    def _await_answer(self, rail: RailState) -> None:
        """Wait until the peer has stopped a rail too, or has ended.

        The rails of a peer that closes the link may be seen to end before it is heard to say so.
        """
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not (rail.peer_has_stopped or self._peer_has_ended or self._stopping):
            if time.monotonic() > deadline:
                return
            for descriptor in self._control.readable(_SLICE_SECONDS):
                self._handle_control(descriptor)

    def _drain(self) -> None:
        """Have everything handled that the peer sent before it ended."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while not (self._stopping or self._carrier.drain(_SLICE_SECONDS)):
            if time.monotonic() > deadline:
                return

    def _handle_control(self, descriptor: int) -> None:
        if self._peer_has_ended:
            return
        try:
            messages = self._control.receive(descriptor)
        except ConnectionError as ended:
            if isinstance(ended, PathsLost):
                self._fail(f"rank {self._peer} cannot be reached any more: {ended}")
            self._end_with_peer(descriptor)
            return
        if descriptor not in self._control.filenos():
            self._unregister(descriptor)
        for message in messages:
            if "fault" in message:
                self._fail(str(message["fault"]))
            if "lost" in message:
                self._handle_peer_loss(int(message["lost"]), str(message["reason"]))
            if "closed" in message:
                self._end_with_peer(descriptor)

    def _end_with_peer(self, descriptor: int) -> None:
        for known in (descriptor, *self._control.filenos()):
            self._unregister(known)
        self._drain()
        self._peer_has_ended = True
        self._local.ring()

    def _handle_peer_loss(self, index: int, reason: str) -> None:
        rail = self._rails[index]
        rail.peer_has_stopped = True
        if rail.live:
            self._lose(index, f"rank {self._peer} says: {reason}")
        elif rail.is_reported:
            self._retransmit(index)
        else:
            self._report(index)

    def _lose(self, index: int, reason: str, *, may_have_ended: bool = False) -> None:
        """Stop a rail at this end and have the peer stop it too.

        `may_have_ended`: the reason may be that the peer has ended or closed the link.
        """
        rail = self._rails[index]
        if not rail.live:
            return
        rail.live, rail.loss = False, reason
        self._carrier.stop_rail(index)
        if self._peer_has_ended:
            return
        # If it fails the control connections have ended, and the answer is that the peer has.
        with contextlib.suppress(OSError):
            self._send({"lost": index, "reason": reason})
        if may_have_ended:
            self._await_answer(rail)
        self._report(index)

    def _report(self, index: int) -> None:
        """Say that a rail is lost, unless it has ended with the peer, and go on without it."""
        rail = self._rails[index]
        # An end that is closing may not hear any more that the peer has closed too.
        if rail.is_reported or self._peer_has_ended or self._stopping:
            return
        rail.is_reported = True
        left = sum(other.live for other in self._rails)
        _log.warning("%s: %s", self._name, self._loss(index))
        if left == 0:
            self._fail(f"the last rail, {rail.name}, is lost: {rail.loss}")
        if rail.peer_has_stopped:
            self._retransmit(index)

    def _loss(self, index: int) -> str:
        """What was lost and what goes on. A rail is a pair of NICs, with several connections."""
        lost = self._rails[index]
        names = list(dict.fromkeys(rail.name for rail in self._rails))
        live = {rail.name for rail in self._rails if rail.live}
        what = f"rail {names.index(lost.name)} ({lost.name})"
        left = f"{len(live)} of {len(names)} rails"
        if len(names) == len(self._rails):
            return f"{what} is lost: {lost.loss}; {left} go on"
        count = sum(rail.name == lost.name for rail in self._rails)
        number = sum(rail.name == lost.name for rail in self._rails[:index])
        live_count = sum(rail.live for rail in self._rails)
        connections = f"{live_count} of {counted(len(self._rails), 'connection')}"
        return (
            f"connection {number + 1} of the {count} of {what} is lost: {lost.loss}; "
            f"{connections} go on, over {left}"
        )

    def _retransmit(self, index: int) -> None:
        count = self._carrier.retransmit(index)
        if count:
            entries = f"{counted(count, 'entry', 'entries')} of rail {index}"
            _log.warning("%s: %s sent again", self._name, entries)

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._control.send(message)

    def _fail(self, reason: str) -> None:
        if not self._remote.has_failed:
            self._remote.fail(reason)
        self._local.ring()
