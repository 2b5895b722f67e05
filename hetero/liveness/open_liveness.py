"""Opens a rank's liveness connection, as soon as the ranks share a store."""

from __future__ import annotations

import json
import secrets
import socket
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from hetero.addresses import address_leading_to
from hetero.liveness.liveness import Liveness, ServerAddress
from hetero.liveness.liveness_client import LivenessClient
from hetero.liveness.liveness_server import LivenessServer

_ADDRESS_KEY = "hetero/liveness"
_PRESENT_KEY = "hetero/present"
"""The ranks that have opened the store: a line for each, with its host."""
_NO_TIMEOUT = timedelta(days=30)
"""The agreement has a timeout for rank 0; the client's thread needs none of its own."""


def open_liveness(store: Any, *, rank: int, world_size: int, master: str) -> Liveness:
    """Rank 0 listens and publishes its address; the others wait for that, and connect, in a thread.

    `store` is one of torch's. `master` is the host by which it was reached: rank 0's, unless a
    rendezvous put it elsewhere. Returns at once, without waiting for rank 0, which may start much
    later.
    """
    # A connection of its own: waits block the caller's, and one will block this.
    own = store.clone()
    own.append(_PRESENT_KEY, f"{rank} {socket.gethostname()}\n")

    def present() -> dict[int, str]:
        lines = own.get(_PRESENT_KEY).decode().splitlines()
        return {int(rank): host for rank, host in (line.split(" ", 1) for line in lines)}

    if rank == 0:
        token = secrets.token_hex(16)
        server = LivenessServer(world_size=world_size, token=token, present=present)
        host = address_leading_to(master) or ""
        address = ServerAddress(host, server.port, token)
        store.set(_ADDRESS_KEY, json.dumps(asdict(address)))
        return server

    def find_server() -> ServerAddress:
        own.wait([_ADDRESS_KEY], _NO_TIMEOUT)
        address = json.loads(own.get(_ADDRESS_KEY))
        return ServerAddress(address["host"] or master, address["port"], address["token"])

    return LivenessClient(find_server, rank=rank, world_size=world_size)
