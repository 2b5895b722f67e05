"""How two ends of a link meet: one listens, the other connects, and each shows the job's token.

The address goes through the job's rendezvous store, and so does the token: whoever may read the
store may join the job. The token keeps out everyone else, be it another job that was given the same
port or a program that tries all ports. A stranger is turned away and the listener goes on
listening. Afterwards the two compare their parameters: a difference is an error on both sides.
docs/wire.md has what the two exchange, for programs that are not ours.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hetero.addresses import family_of
from hetero.errors import LinkError
from hetero.link.base import LinkDescription
from hetero.store import Store, WaitAborted

_TOKEN_BYTES = 32
_LENGTH = struct.Struct("<I")
_MAX_JSON_BYTES = 1 << 20


@dataclass(frozen=True)
class Rendezvous:
    """Where and how the two ends of one link meet."""

    store: Store
    description: LinkDescription
    name: str
    """The same on both sides and different for every link of the job."""
    listens: bool
    secret: bytes
    timeout: float = 120.0
    """Seconds for the two to meet; one may start much later than the other."""

    def key(self, what: str) -> str:
        return f"hetero/link/{self.name}/{what}"

    def failure(self, what: str, remedy: str) -> LinkError:
        return LinkError(f"{self.description} could not be opened: {what}; {remedy}")


def send_json(connection: socket.socket, value: Mapping[str, Any]) -> None:
    data = json.dumps(value).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the peer closed the connection")
        data += part
    return bytes(data)


def receive_json(connection: socket.socket) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
    if length > _MAX_JSON_BYTES:
        raise ConnectionError("the peer sent something that is no part of this protocol")
    return dict(json.loads(receive_exactly(connection, length)))


class StrangerError(ConnectionError):
    """What answered is no end of this link."""


def _token(rendezvous: Rendezvous, *, of_listener: bool) -> bytes:
    """What an end of this link shows: the job's secret, for this link and this end alone."""
    role = b"listener" if of_listener else b"caller"
    return hmac.digest(rendezvous.secret, role + rendezvous.name.encode(), "sha256")


def show_token(connection: socket.socket, rendezvous: Rendezvous) -> None:
    """Show ours and compare theirs; raises StrangerError where it is another.

    The caller shows its own first, so that a listener tells strangers nothing.
    """
    if not rendezvous.listens:
        connection.sendall(_token(rendezvous, of_listener=False))
    theirs = receive_exactly(connection, _TOKEN_BYTES)
    if not hmac.compare_digest(theirs, _token(rendezvous, of_listener=not rendezvous.listens)):
        raise StrangerError("the other side does not belong to this job")
    if rendezvous.listens:
        connection.sendall(_token(rendezvous, of_listener=True))


def accept(listener: socket.socket, rendezvous: Rendezvous) -> socket.socket:
    """A connection of this link's peer; all others are turned away."""
    deadline = time.monotonic() + rendezvous.timeout
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise rendezvous.failure(
                f"rank {rendezvous.description.peer} did not connect within "
                f"{rendezvous.timeout:g} s",
                "see that its host can reach this one",
            )
        listener.settimeout(remaining)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        connection.settimeout(min(10.0, remaining))
        try:
            show_token(connection, rendezvous)
            return connection
        except (OSError, ValueError):
            connection.close()


def listen_at(address: str) -> socket.socket:
    """Listen at a local address, at a port of the kernel's choice."""
    return socket.create_server((address, 0), family=family_of(address), backlog=64)


def connect(
    address: Any, rendezvous: Rendezvous, *, family: int, source: tuple[str, int] | None = None
) -> socket.socket:
    """Connect to the listener and show our token, trying again until the deadline."""
    deadline = time.monotonic() + rendezvous.timeout
    while True:
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            if source is not None:
                connection.bind(source)
            connection.settimeout(max(0.1, min(10.0, deadline - time.monotonic())))
            connection.connect(address)
            show_token(connection, rendezvous)
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline or isinstance(error, StrangerError):
                raise rendezvous.failure(
                    f"rank {rendezvous.description.peer} at {address} could not be reached "
                    f"({error})",
                    "see that the address and its port are open to this host",
                ) from error
            time.sleep(0.05)


def publish(rendezvous: Rendezvous, what: str, value: Mapping[str, Any]) -> None:
    rendezvous.store.set(rendezvous.key(what), json.dumps(value))


def look_up(rendezvous: Rendezvous, what: str) -> dict[str, Any]:
    """Wait for what the other side publishes."""
    key = rendezvous.key(what)
    try:
        rendezvous.store.wait([key], timedelta(seconds=rendezvous.timeout))
    except WaitAborted:
        raise
    except Exception as error:
        raise rendezvous.failure(
            f"rank {rendezvous.description.peer} said nothing about its {what} within "
            f"{rendezvous.timeout:g} s",
            "see its log",
        ) from error
    return dict(json.loads(rendezvous.store.get(key)))


def exchange(rendezvous: Rendezvous, what: str, mine: Mapping[str, Any]) -> dict[str, Any]:
    """Tell the other side, and hear the same of it."""
    ours, theirs = ("listener", "caller") if rendezvous.listens else ("caller", "listener")
    publish(rendezvous, f"{what} of the {ours}", mine)
    return look_up(rendezvous, f"{what} of the {theirs}")


def compare(connection: socket.socket, rendezvous: Rendezvous, mine: Mapping[str, Any]) -> None:
    """Both sides must open the link with the same parameters."""
    send_json(connection, mine)
    theirs = receive_json(connection)
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            raise rendezvous.failure(
                f"{name} is {mine.get(name)!r} here and {theirs.get(name)!r} on rank "
                f"{rendezvous.description.peer}",
                "start both sides with the same flags and the same version of this project",
            )
