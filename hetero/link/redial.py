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
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from hetero.link.handshake import (
    TOKEN_BYTES,
    TOKEN_SECONDS,
    Rendezvous,
    exchange_tokens,
    receive_json,
    send_json,
)
from hetero.startup.addresses import family_of
from hetero.startup.process import close_in_children

_DIAL_SECONDS = 2.0
"""The time to connect, which is enough to send a lost SYN again, and then for each message."""
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


@dataclass(frozen=True)
class _Pending:
    connection: socket.socket
    deadline: float
    dialed: tuple[Place, int] | None
    """Place and opening; None for a connection that was accepted."""


class Redial:
    """One end's attempts. Any one thread at a time may call it; only handshakes block, shortly."""

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
        """Readable when `progress` has something to do."""
        return int(self._selector.fileno())

    def is_dialing(self, place: Place) -> bool:
        return any(one.dialed and one.dialed[0] == place for one in self._pending.values())

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
            self._await(connection, _DIAL_SECONDS, (place, opening), selectors.EVENT_WRITE)
        else:
            connection.close()
            self._note(place, OSError(code, os.strerror(code)))

    def _await(
        self,
        connection: socket.socket,
        seconds: float,
        dialed: tuple[Place, int] | None,
        event: int,
    ) -> None:
        pending = _Pending(close_in_children(connection), time.monotonic() + seconds, dialed)
        self._pending[connection.fileno()] = pending
        self._selector.register(connection, event)

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

        `admit` decides at the listener whether a connection may replace the one in that place, with
        the number of its opening. Never raises.
        """
        for key, _ in self._selector.select(0):
            pending = self._pending.pop(key.fd, None)
            if pending is None:
                self._accept(key.fileobj)  # type: ignore[arg-type]
                continue
            self._selector.unregister(pending.connection)
            try:
                if pending.dialed is None:
                    reopened = self._answer(pending.connection, admit)
                else:
                    reopened = self._ask(pending.connection, *pending.dialed)
                reopened.connection.settimeout(None)
                if reopened.place.kind == "rail":
                    self._tune(reopened.connection)
            except (OSError, ValueError, KeyError) as error:
                pending.connection.close()
                if pending.dialed is not None:
                    failure = error if isinstance(error, OSError) else OSError(str(error))
                    self._note(pending.dialed[0], failure)
                continue
            self._refused_since = None
            yield reopened
        for pending in [one for one in self._pending.values() if one.deadline < time.monotonic()]:
            self._drop(pending)
            if pending.dialed is not None:
                self._note(pending.dialed[0], OSError("nothing answers"))

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it has gone by now
            connection, _ = listener.accept()
            # Readable once its whole token has come, or its end.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, TOKEN_BYTES)
            self._await(connection, TOKEN_SECONDS, None, selectors.EVENT_READ)

    def _ask(self, connection: socket.socket, place: Place, opening: int) -> Reopened:
        if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, os.strerror(code))
        connection.settimeout(_DIAL_SECONDS)
        exchange_tokens(connection, self._rendezvous)
        request = {"kind": place.kind, "index": place.index, "opening": opening}
        send_json(connection, {**request, "padding": _PADDING})
        if not receive_json(connection)["admitted"]:
            raise OSError("the other end is not ready for it")
        return Reopened(place, opening, connection)

    def _answer(self, connection: socket.socket, admit: Callable[[Place, int], bool]) -> Reopened:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        connection.settimeout(_DIAL_SECONDS)
        exchange_tokens(connection, self._rendezvous)
        request = receive_json(connection)
        place, opening = Place(request["kind"], request["index"]), request["opening"]
        admitted = admit(place, opening)
        send_json(connection, {"admitted": admitted, "padding": _PADDING})
        if not admitted:
            raise ConnectionError("it was not admitted")
        return Reopened(place, opening, connection)

    def _drop(self, pending: _Pending) -> None:
        self._pending.pop(pending.connection.fileno())
        self._selector.unregister(pending.connection)
        pending.connection.close()

    def close(self) -> None:
        """Close what is pending, and listen no more: a caller is refused from here on."""
        for pending in list(self._pending.values()):
            self._drop(pending)
        self._stack.close()
