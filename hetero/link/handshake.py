"""Rendezvous of two ends of a link: one listens, the other connects, and both authenticate.

docs/wire.md specifies the protocol. The tokens keep out everyone who cannot read the job's store,
such as another job that was given the same port: the listener closes such connections and goes on.
"""

from __future__ import annotations

import hmac
import json
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistStoreError

from hetero.errors import LinkError
from hetero.link.base import LinkDescription
from hetero.startup.addresses import family_of
from hetero.startup.process import close_in_children
from hetero.startup.store import BoundedStore, as_link_error

TOKEN_BYTES = 32
_CONFIRMATION = b"\0"
TOKEN_SECONDS = 10.0
"""The time for one attempt to connect, and for the token of either side to arrive."""
_LENGTH = struct.Struct("<I")
_MAX_JSON_BYTES = 1 << 20
T = TypeVar("T")
Steps = Generator[int, None, T]
"""Yields the event of `selectors` to wait for, on a connection that does not block."""


@dataclass(frozen=True)
class Rendezvous:
    """The parameters with which one end of a link finds and authenticates the other."""

    store: BoundedStore
    description: LinkDescription
    name: str
    """The name of the link: equal at both ends, unique in the job."""
    timeout: float = 120.0
    """Seconds to wait for the other end."""
    check_abort: Callable[[], None] = lambda: None
    """Called every second while the other end is waited for in the store; may raise to abort."""
    has_exited: Callable[[], bool] = lambda: False
    """Returns whether the other end's process is known to have ended. Called while an open link has
    no connection left, from another thread; must not block."""

    @property
    def listens(self) -> bool:
        """True at the end of the lower rank, which listens; the other end connects."""
        return self.description.rank < self.description.peer

    @property
    def side(self) -> int:
        """0 for the listener, 1 for the caller."""
        return 0 if self.listens else 1

    def key(self, what: str) -> str:
        return f"hetero/link/{self.name}/{what}"

    def failure(self, what: str, remedy: str) -> LinkError:
        return LinkError(f"{self.description} could not be opened: {what}; {remedy}")


def _completed(steps: Steps[T]) -> T:
    """The result of steps over a connection that blocks: they yield nothing."""
    try:
        event = next(steps)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError(f"a blocking connection would have to wait for event {event}")


def frame(value: Mapping[str, Any]) -> bytes:
    """A message of a connection beside the rails."""
    data = json.dumps(value).encode()
    return _LENGTH.pack(len(data)) + data


def sending(connection: socket.socket, data: bytes) -> Steps[None]:
    left = memoryview(data)
    while left:
        try:
            left = left[connection.send(left) :]
        except BlockingIOError:
            yield selectors.EVENT_WRITE


def receiving(connection: socket.socket, count: int) -> Steps[bytes]:
    data = bytearray()
    while len(data) < count:
        try:
            part = connection.recv(count - len(data))
        except BlockingIOError:
            yield selectors.EVENT_READ
            continue
        if not part:
            raise ConnectionError("the peer closed the connection")
        data += part
    return bytes(data)


def receiving_json(connection: socket.socket) -> Steps[dict[str, Any]]:
    (length,) = _LENGTH.unpack((yield from receiving(connection, _LENGTH.size)))
    if length > _MAX_JSON_BYTES:
        raise ConnectionError("the peer sent a message that does not belong to this protocol")
    return dict(json.loads((yield from receiving(connection, length))))


def send_json(connection: socket.socket, value: Mapping[str, Any]) -> None:
    connection.sendall(frame(value))


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    return _completed(receiving(connection, count))


def receive_json(connection: socket.socket) -> dict[str, Any]:
    return _completed(receiving_json(connection))


class AuthenticationError(ConnectionError):
    """The other side is not an end of this link."""


def _token(rendezvous: Rendezvous, *, of_listener: bool) -> bytes:
    """An HMAC of the link's name and the end's role, keyed with the secret."""
    key = rendezvous.description.secret.encode()
    role = b"listener" if of_listener else b"caller"
    return hmac.digest(key, role + rendezvous.name.encode(), "sha256")


def exchanging_tokens(connection: socket.socket, rendezvous: Rendezvous) -> Steps[None]:
    """Authenticate both ends. Raises AuthenticationError if the other side's token is wrong.

    The caller sends its token first, so that a listener reveals none to strangers. It confirms the
    listener's, so that none takes a connection that the caller has meanwhile given up.
    """
    if not rendezvous.listens:
        yield from sending(connection, _token(rendezvous, of_listener=False))
    theirs = yield from receiving(connection, TOKEN_BYTES)
    if not hmac.compare_digest(theirs, _token(rendezvous, of_listener=not rendezvous.listens)):
        raise AuthenticationError("the other side does not belong to this job")
    if rendezvous.listens:
        yield from sending(connection, _token(rendezvous, of_listener=True))
        yield from receiving(connection, len(_CONFIRMATION))
    else:
        yield from sending(connection, _CONFIRMATION)


def exchange_tokens(connection: socket.socket, rendezvous: Rendezvous) -> None:
    """The same over a connection that blocks."""
    _completed(exchanging_tokens(connection, rendezvous))


def accept(listener: socket.socket, rendezvous: Rendezvous) -> socket.socket:
    """Accept a connection of this link's peer; close all others.

    One that says nothing, as a port scanner's, holds up nobody.
    """
    deadline = time.monotonic() + rendezvous.timeout
    with selectors.DefaultSelector() as selector, ExitStack() as pending:
        selector.register(listener, selectors.EVENT_READ)
        while (remaining := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(remaining):
                if key.fileobj is not listener:
                    selector.unregister(key.fileobj)
                    if _authenticates(key.data, rendezvous):
                        return close_in_children(key.data.dup())
                    key.data.close()
                    continue
                connection = pending.enter_context(listener.accept()[0])
                # Readable once its whole token has come, or its end.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, TOKEN_BYTES)
                selector.register(connection, selectors.EVENT_READ, connection)
    raise rendezvous.failure(
        f"rank {rendezvous.description.peer} did not connect within {rendezvous.timeout:g} s",
        "see that its host can reach this one",
    )


def _authenticates(connection: socket.socket, rendezvous: Rendezvous) -> bool:
    """Returns whether a connection is the peer's."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    connection.settimeout(TOKEN_SECONDS)
    try:
        exchange_tokens(connection, rendezvous)
    except (OSError, ValueError):
        return False
    return True


def has_ended(connection: socket.socket) -> bool:
    """Returns whether the peer's process has closed the connection or died. Never blocks."""
    poller = select.poll()
    poller.register(connection, select.POLLIN | select.POLLHUP)
    return any(connection.recv(1, socket.MSG_PEEK) == b"" for _ in poller.poll(0))


def listen_at(address: str) -> socket.socket:
    """Listen at a local address, on a free port."""
    return socket.create_server((address, 0), family=family_of(address), backlog=64)


def connect(
    address: Any, rendezvous: Rendezvous, *, family: int, source: tuple[str, int] | None = None
) -> socket.socket:
    """Connect to the listener and authenticate, retrying until the deadline."""
    deadline = time.monotonic() + rendezvous.timeout
    while True:
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            if source is not None:
                connection.bind(source)
            connection.settimeout(max(0.1, min(TOKEN_SECONDS, deadline - time.monotonic())))
            connection.connect(address)
            exchange_tokens(connection, rendezvous)
            return close_in_children(connection)
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline or isinstance(error, AuthenticationError):
                where = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
                raise rendezvous.failure(
                    f"rank {rendezvous.description.peer} at {where} could not be reached ({error})",
                    "see that the address and its port are open to this host",
                ) from error
            time.sleep(0.05)


def publish(rendezvous: Rendezvous, what: str, value: Mapping[str, Any]) -> None:
    with as_link_error(f"{rendezvous.description} could not be opened"):
        rendezvous.store.set(rendezvous.key(what), json.dumps(value))


def look_up(rendezvous: Rendezvous, what: str) -> dict[str, Any]:
    """Wait for a value that the other side publishes."""
    key = rendezvous.key(what)
    with as_link_error(f"{rendezvous.description} could not be opened"):
        try:
            limit = timedelta(seconds=rendezvous.timeout)
            rendezvous.store.wait([key], limit, check_abort=rendezvous.check_abort)
        except DistStoreError as error:
            peer = rendezvous.description.peer
            raise rendezvous.failure(
                f"rank {peer} did not answer within {rendezvous.timeout:g} s",
                "see its log, whether it opens this link too, and whether it can reach the store",
            ) from error
        return dict(json.loads(rendezvous.store.get(key)))


def exchange(rendezvous: Rendezvous, what: str, mine: Mapping[str, Any]) -> dict[str, Any]:
    """Publish a value and return the other side's."""
    ours, theirs = ("listener", "caller") if rendezvous.listens else ("caller", "listener")
    publish(rendezvous, f"{what} of the {ours}", mine)
    return look_up(rendezvous, f"{what} of the {theirs}")


def compare(connection: socket.socket, rendezvous: Rendezvous, mine: Mapping[str, Any]) -> None:
    """Raise LinkError, at both ends, unless they have the same parameters."""
    send_json(connection, mine)
    theirs = receive_json(connection)
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            raise rendezvous.failure(
                f"{name} is {mine.get(name)!r} here and {theirs.get(name)!r} on rank "
                f"{rendezvous.description.peer}",
                "start both sides with the same flags and the same version of this project",
            )
