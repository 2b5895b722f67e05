"""Which ranks are in a group: each listens until it leaves the group or its process ends.

Nothing is ever accepted or sent. The kernel resets the connections of a process that has ended, and
refuses new ones. So a rank that waits for another one to open a link learns of its end.
"""

from __future__ import annotations

import socket

from hetero.collectives.vendor_layout import Member
from hetero.errors import LinkError
from hetero.startup.addresses import (
    PORT_RANGE,
    interface_with,
    is_loopback,
    listen_everywhere,
)
from hetero.startup.process import close_in_children

_LARGEST_BACKLOG = 4096
_CONNECT_SECONDS = 1.0


class Presence:
    """One rank's listener, and its connections to those that it waits for.

    Args:
        size: of the group.
        store_host: by which name this rank reaches the host of the store.
    """

    def __init__(self, *, size: int, store_host: str) -> None:
        # A rank's two kinds of devices wait for each peer twice each: calls and messages.
        self._listener = listen_everywhere(backlog=min(4 * size, _LARGEST_BACKLOG))
        close_in_children(self._listener)
        self.store_host = store_host
        self.port: int = self._listener.getsockname()[1]
        self._connections: dict[int, socket.socket] = {}

    def has_gone(self, member: Member) -> bool:
        """Whether a rank of the group has ended or left. Any thread may call it."""
        if _is_own_address_of_another_host(member):
            return False
        connection = self._connections.get(member.rank)
        try:
            # A connection may be lost with a network. Only a refusal shows that nobody listens.
            if connection is None or _is_lost(connection):
                self._connections[member.rank] = self._connect(member)
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False

    def require(self, member: Member) -> None:
        """Raise LinkError if a rank of the group has ended or left."""
        was_reached = member.rank in self._connections
        if not self.has_gone(member):
            return
        if was_reached:
            raise LinkError(f"{member} has ended, or has left the group; see its log")
        host, port = member.address
        raise LinkError(
            f"{member} has ended, or has left the group, or a firewall rejects connections to "
            f"{host}:{port}; see its log, or open the ports between the hosts ({PORT_RANGE})"
        )

    def _connect(self, member: Member) -> socket.socket:
        host, port = member.address
        # A rank whose own address is of the loopback interface is on the store's host.
        host = self.store_host if is_loopback(host) else host
        connection = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
        connection.setblocking(False)
        return connection

    def leave(self) -> None:
        """Stop listening. The others' `require` raises from now on."""
        for connection in (self._listener, *self._connections.values()):
            connection.close()


def _is_own_address_of_another_host(member: Member) -> bool:
    """Whether this host has a member's address too, as of `docker0`, and would answer itself."""
    host, _ = member.address
    if is_loopback(host) or member.host == socket.gethostname():
        return False
    return interface_with(host) is not None


def _is_lost(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
