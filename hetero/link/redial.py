"""Opens connections of a link again while both its ends live.

The caller dials the addresses at which the link was opened, and the listener goes on listening
there. Each new connection is authenticated as the first ones were, says which one it replaces, and
carries packets of full size in both directions before it is taken: a path that loses those would be
lost again with the link's data.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from hetero.link.handshake import (
    TOKEN_SECONDS,
    Rendezvous,
    Steps,
    exchanging_tokens,
    frame,
    receiving_json,
    sending,
)
from hetero.startup.addresses import family_of
from hetero.startup.process import close_in_children

_DIAL_SECONDS = 2.0
_REST_SECONDS = 1.0
"""The time to connect, which is enough to send a lost SYN again, and then for each exchange."""
_REFUSED_SECONDS = 3.0
"""While every address that answers refuses, before the other process counts as ended: longer than a
firewall takes to load its rules."""
_PADDING = " " * (32 << 10)
"""Of a message: several of the largest packets."""


@dataclass(frozen=True)
class Place:
    """The place of a connection in its link."""

    kind: str
    """`rail` or `control`."""
    index: int
    """Among those of its kind, in the order in which the link was opened."""


@dataclass(frozen=True)
class Route:
    """The addresses between which the caller dials."""

    source: str
    address: tuple[str, int]


@dataclass(frozen=True)
class Reopened:
    """A new connection, authenticated and blocking, that either end is to put in its place."""

    place: Place
    opening: int
    """1 for the first time that this place is opened again, and so on."""
    connection: socket.socket


@dataclass
class _Pending:
    """A connection that does not block, while its ends authenticate and agree on its place."""

    connection: socket.socket
    dialed: Place | None
    """None for a connection that was accepted."""
    steps: Steps[Reopened]
    deadline: float


class Redial:
    """One end's attempts. Any one thread at a time may call it. Nothing blocks."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        patience: float,
        tune: Callable[[socket.socket], None],
        listeners: Sequence[socket.socket] = (),
        routes: Mapping[Place, Route] | None = None,
    ) -> None:
        """Owns the listening sockets.

        Args:
            patience: seconds after which a link without any connection has failed.
            tune: sets the options of a rail's connection.
            listeners: of the listener.
            routes: of the caller.
        """
        self.patience = patience
        self.failure = "the other end has not answered"
        """Why the last attempt that ended has failed."""
        self._rendezvous, self._tune = rendezvous, tune
        self._routes = routes or {}
        self._pending: dict[int, _Pending] = {}
        self._refused_since: float | None = None
        self._resting: list[tuple[float, socket.socket]] = []
        """Listeners for which there was no descriptor, and until when."""
        self._stack = ExitStack()
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        for listener in listeners:
            listener.setblocking(False)
            self._stack.enter_context(listener)
            self._selector.register(listener, selectors.EVENT_READ)
        if rendezvous.listens:
            self.failure = f"rank {rendezvous.description.peer} did not connect again"

    @property
    def dials(self) -> bool:
        return not self._rendezvous.listens

    def fileno(self) -> int:
        """Readable when `progress` has something to do, but for deadlines."""
        return int(self._selector.fileno())

    @property
    def is_pending(self) -> bool:
        """True while a connection has been dialed or accepted and is not in its place, or waits."""
        return bool(self._pending or self._resting)

    def is_dialing(self, place: Place) -> bool:
        return any(one.dialed == place for one in self._pending.values())

    def peer_has_exited(self) -> bool:
        """Returns whether the other process has ended, as others know or its addresses show."""
        return self._rendezvous.has_exited() or self.refused_seconds() > _REFUSED_SECONDS

    def refused_seconds(self) -> float:
        """For how long every address that answers has refused, as where no process listens."""
        return 0.0 if self._refused_since is None else time.monotonic() - self._refused_since

    def dial(self, place: Place, opening: int) -> None:
        """Begin to connect."""
        route = self._routes[place]
        connection = socket.socket(family_of(route.address[0]), socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.bind((route.source, 0))
            code = connection.connect_ex(route.address)
        except OSError as error:
            code = error.errno or errno.EINVAL
        if code in (0, errno.EINPROGRESS):
            steps = self._ask(connection, place, opening)
            self._begin(_Pending(connection, place, steps, time.monotonic() + _DIAL_SECONDS))
        else:
            connection.close()
            self._note(place, OSError(code, os.strerror(code)))

    def _begin(self, pending: _Pending) -> None:
        close_in_children(pending.connection)
        self._pending[pending.connection.fileno()] = pending
        # Writable once it is connected, or has failed.
        event = selectors.EVENT_READ if pending.dialed is None else selectors.EVENT_WRITE
        self._selector.register(pending.connection, event)

    def _note(self, place: Place, error: OSError) -> None:
        route = self._routes[place]
        host, port = route.address
        self.failure = f"{host}:{port} from {route.source}: {error.strerror or error}"
        if isinstance(error, ConnectionRefusedError) or error.errno == errno.ECONNREFUSED:
            self._refused_since = self._refused_since or time.monotonic()
        else:
            self._refused_since = None

    def progress(self, admit: Callable[[Place, int], bool]) -> Iterator[Reopened]:
        """Yields the connections that have been opened again.

        Call it when `fileno` is readable, and now and then: it gives up what takes too long.
        `admit` decides at the listener whether a connection may replace the one in that place, with
        the number of its opening. Never raises.
        """
        for key, _ in self._selector.select(0):
            pending = self._pending.get(key.fd)
            if pending is None:
                self._accept(key.fileobj, admit)  # type: ignore[arg-type]
            elif (reopened := self._continue(pending)) is not None:
                yield reopened
        now = time.monotonic()
        while self._resting and self._resting[0][0] < now:
            self._selector.register(self._resting.pop(0)[1], selectors.EVENT_READ)
        for pending in [one for one in self._pending.values() if one.deadline < now]:
            self._fail(pending, OSError("nothing answers"))

    def _continue(self, pending: _Pending) -> Reopened | None:
        """Take the steps that wait for nothing; returns what the last one has opened."""
        try:
            self._selector.modify(pending.connection, next(pending.steps))
            return None
        except StopIteration as end:
            reopened: Reopened = end.value
        except (OSError, ValueError, KeyError) as error:
            self._fail(pending, error if isinstance(error, OSError) else OSError(str(error)))
            return None
        self._forget(pending)
        self._refused_since = None
        return reopened

    def _accept(self, listener: socket.socket, admit: Callable[[Place, int], bool]) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            # Otherwise it has gone by now. A listener that lacks a descriptor stays readable.
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._selector.unregister(listener)
                self._resting.append((time.monotonic() + _REST_SECONDS, listener))
            return
        connection.setblocking(False)
        steps = self._answer(connection, admit)
        self._begin(_Pending(connection, None, steps, time.monotonic() + TOKEN_SECONDS))

    def _ask(self, connection: socket.socket, place: Place, opening: int) -> Steps[Reopened]:
        if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, os.strerror(code))
        self._give_time(connection)
        yield from exchanging_tokens(connection, self._rendezvous)
        self._give_time(connection)
        request = {"kind": place.kind, "index": place.index, "opening": opening}
        yield from sending(connection, frame({**request, "padding": _PADDING}))
        answer = yield from receiving_json(connection)
        if not answer["admitted"]:
            raise OSError("the other end is not ready for it")
        return self._opened(place, opening, connection)

    def _answer(
        self, connection: socket.socket, admit: Callable[[Place, int], bool]
    ) -> Steps[Reopened]:
        yield from exchanging_tokens(connection, self._rendezvous)
        self._give_time(connection)
        request = yield from receiving_json(connection)
        place, opening = Place(request["kind"], request["index"]), request["opening"]
        admitted = admit(place, opening)
        self._give_time(connection)
        yield from sending(connection, frame({"admitted": admitted, "padding": _PADDING}))
        if not admitted:
            raise ConnectionError("it was not admitted")
        return self._opened(place, opening, connection)

    def _give_time(self, connection: socket.socket) -> None:
        self._pending[connection.fileno()].deadline = time.monotonic() + _DIAL_SECONDS

    def _opened(self, place: Place, opening: int, connection: socket.socket) -> Reopened:
        connection.settimeout(None)
        if place.kind == "rail":
            self._tune(connection)
        return Reopened(place, opening, connection)

    def _fail(self, pending: _Pending, error: OSError) -> None:
        self._forget(pending)
        pending.connection.close()
        if pending.dialed is not None:
            self._note(pending.dialed, error)

    def _forget(self, pending: _Pending) -> None:
        self._pending.pop(pending.connection.fileno())
        self._selector.unregister(pending.connection)

    def close(self) -> None:
        """Close what is pending, and listen no more: a caller is refused from here on."""
        for pending in list(self._pending.values()):
            self._forget(pending)
            pending.connection.close()
        self._stack.close()
