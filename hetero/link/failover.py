"""What a carried link leaves to Python: rails that are lost, and what the peer says of itself.

When a rail is lost at one end, that end stops it and says so; the other stops its own half and
answers. Only when both have stopped can no late packet fall into a place that is used again, and
only then are the rail's unfinished entries sent again, over others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hetero.link.carrier import Carrier
from hetero.link.control import Control
from hetero.link.ring import EndState

_log = logging.getLogger(__name__)
# Longer than its longest step: what it uses is freed after it.
_JOIN_SECONDS = 15.0
_SETTLE_SECONDS = 2.0
_CLOSING_SECONDS = 0.2
"""How long after the end of a rail a peer that has closed the link may be heard to say so."""


@dataclass
class WatchedRail:
    """What the two ends have said of one rail."""

    name: str
    live: bool = True
    peer_has_stopped: bool = False
    """Whether the peer has told that it has stopped this rail."""


class Watch:
    """A thread that sleeps until a rail, a NIC or the peer has something to say."""

    def __init__(
        self,
        carrier: Carrier,
        control: Control,
        *,
        rails: Sequence[str],
        peer_state: EndState,
        wake_link: Callable[[], None],
        name: str,
        peer: int,
    ) -> None:
        """`peer_state` is where this side's link looks for the fault that ends it.

        `wake_link` has it look.
        """
        self._carrier = carrier
        self._control = control
        self._rails = [WatchedRail(name) for name in rails]
        self._peer_state = peer_state
        self._wake_link = wake_link
        self._name = name
        self._peer = peer
        self._sending = threading.Lock()
        self._peer_has_gone = self._stopping = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._handlers = selectors.DefaultSelector()
        self._attend(self._wake_fd, lambda: None)
        for descriptor in control.filenos():
            self._attend(descriptor, partial(self._handle_control, descriptor))
        self._attend(carrier.loss_fd, self._handle_losses)
        for index in range(len(rails)):
            if (descriptor := carrier.async_fd(index)) >= 0:
                self._attend(descriptor, partial(self._handle_async_event, index))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def peer_has_gone(self) -> bool:
        """Whether the peer has ended or closed its side; what came before has arrived then."""
        return self._peer_has_gone

    def send_fault(self, reason: str) -> None:
        """Tell the peer why this end takes part no more. Any thread may."""
        try:
            self._tell({"fault": reason})
        except OSError:
            # It has gone, and has no link left that this could end.
            return

    def close(self) -> None:
        """End the thread and the connection: its end is how the peer learns of this one's."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(_JOIN_SECONDS)
        self._control.close()
        self._handlers.close()
        os.close(self._wake_fd)

    def _attend(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers.register(descriptor, selectors.EVENT_READ, handler)

    def _ignore(self, descriptor: int) -> None:
        """Once is enough; what was never attended to is nothing."""
        with contextlib.suppress(KeyError, ValueError):
            self._handlers.unregister(descriptor)

    def _run(self) -> None:
        while not self._stopping:
            ready = self._handlers.select()
            try:
                for key, _ in ready:
                    # One of those before it may have ended it.
                    if key.fd in self._handlers.get_map() and not self._stopping:
                        key.data()
            except Exception as error:  # whatever it is, the link's users must hear of it
                self._fail(f"the link's watch failed ({error})")
                _log.exception("%s: the watch failed", self._name)
                return

    def _handle_losses(self) -> None:
        self._await_peer_close()
        while (loss := self._carrier.next_loss()) is not None:
            self._lose(*loss)

    def _await_peer_close(self) -> None:
        """A peer that closes the link ends its rails too, and they may be seen to end first."""
        deadline = time.monotonic() + _CLOSING_SECONDS
        while not (self._peer_has_gone or self._stopping):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            for descriptor in select.select(self._control.filenos(), [], [], left)[0]:
                self._handle_control(descriptor)

    def _handle_async_event(self, index: int) -> None:
        reason = self._carrier.handle_async_event(index)
        if reason is not None:
            self._lose(index, reason)

    def _handle_control(self, descriptor: int) -> None:
        if self._peer_has_gone:
            return
        try:
            messages = self._control.receive(descriptor)
        except ConnectionError:
            for known in (descriptor, *self._control.filenos()):
                self._ignore(known)
            self._carrier.settle(_SETTLE_SECONDS)
            self._peer_has_gone = True
            self._wake_link()
            return
        if descriptor not in self._control.filenos():
            self._ignore(descriptor)
        for message in messages:
            if "fault" in message:
                self._fail(str(message["fault"]))
            if "lost" in message:
                self._handle_peer_loss(int(message["lost"]), str(message["reason"]))

    def _handle_peer_loss(self, index: int, reason: str) -> None:
        rail = self._rails[index]
        rail.peer_has_stopped = True
        if rail.live:
            self._lose(index, f"rank {self._peer} says: {reason}")
        else:
            self._retransmit(index)

    def _lose(self, index: int, reason: str) -> None:
        """Stop a rail at this end and have the peer stop it at the other."""
        rail = self._rails[index]
        if not rail.live:
            return
        rail.live = False
        self._carrier.stop_rail(index)
        self._ignore(self._carrier.async_fd(index))
        if self._peer_has_gone:
            return
        left = sum(other.live for other in self._rails)
        _log.warning(
            "%s: rail %d (%s) is lost: %s; %d of %d rails go on",
            *(self._name, index, rail.name, reason, left, len(self._rails)),
        )
        try:
            self._tell({"lost": index, "reason": reason})
        except OSError as error:
            self._fail(f"rank {self._peer} cannot be told of a failure ({error})")
        if left == 0:
            self._fail(f"the last rail, {rail.name}, is lost: {reason}")
        if rail.peer_has_stopped:
            self._retransmit(index)

    def _retransmit(self, index: int) -> None:
        count = self._carrier.retransmit(index)
        if count:
            _log.warning("%s: %d entries of rail %d are sent again", self._name, count, index)

    def _tell(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._control.send(message)

    def _fail(self, reason: str) -> None:
        if not self._peer_state.has_failed:
            self._peer_state.fail(reason)
        self._wake_link()
