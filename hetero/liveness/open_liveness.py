"""How ranks open the connections that show who of them is there, as soon as they share a store."""

from __future__ import annotations

import json
import secrets
import socket
from dataclasses import asdict
from datetime import timedelta

from hetero.addresses import address_leading_to
from hetero.liveness.hub import Hub
from hetero.liveness.liveness import HubAddress, Liveness
from hetero.liveness.member import Member
from hetero.store import RendezvousStore, Store

_KEY = "hetero/liveness"
_PRESENT = "hetero/present"
"""The ranks that have opened the store, each in a line with its host."""
_FOR_EVER = timedelta(days=30)
"""Whoever waits for rank 0 has a deadline: the agreement. This thread has none."""


def open_liveness(store: Store, *, rank: int, world_size: int, master: str) -> Liveness:
    """Rank 0 listens and says where; the others wait for that, and call, in a thread.

    `master` is where the store was reached: rank 0 is there too, unless a rendezvous put it
    elsewhere. Nobody waits here for rank 0, which may come much later.
    """
    # A connection of its own: waits hold the other, and one will hold this.
    own: RendezvousStore = store.clone()  # type: ignore[attr-defined]
    own.append(_PRESENT, f"{rank} {socket.gethostname()}\n")

    def present() -> dict[int, str]:
        lines = own.get(_PRESENT).decode().splitlines()
        return {int(rank): host for rank, host in (line.split(" ", 1) for line in lines)}

    if rank == 0:
        token = secrets.token_hex(16)
        hub = Hub(world_size=world_size, token=token, present=present)
        host = address_leading_to(master) or ""
        store.set(_KEY, json.dumps(asdict(HubAddress(host, hub.port, token))))
        return hub

    def find_hub() -> HubAddress:
        own.wait([_KEY], _FOR_EVER)
        told = json.loads(own.get(_KEY))
        return HubAddress(told["host"] or master, told["port"], told["token"])

    return Member(find_hub, rank=rank, world_size=world_size)
