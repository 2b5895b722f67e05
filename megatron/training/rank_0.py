"""How the other ranks find rank 0, and all of them their own addresses."""

from __future__ import annotations

import json
import os
import secrets
import socket

import torch.distributed as dist

from hetero.addresses import Way, address_leading_to, interface_with, own_address
from hetero.agreement import Agreement
from hetero.errors import UserError
from hetero.liveness import Hub, Member

_HUB = "hetero/liveness"
"""Where rank 0 says how to reach it."""
_LONGEST_SILENCE = 30.0
"""Seconds after which the ranks of a host that answers nothing at all have ended."""


def open_hub(store: dist.Store, world_size: int) -> Hub:
    """Rank 0 lets the others find it: at MASTER_ADDR, unless a rendezvous put it elsewhere."""
    token = secrets.token_hex(16)
    hub = Hub(world_size=world_size, token=token, patience=_LONGEST_SILENCE)
    elsewhere = address_leading_to(os.environ["MASTER_ADDR"])
    told = {"address": elsewhere, "port": hub.port, "token": token}
    store.set(_HUB, json.dumps(told))
    return hub


def call_rank_0(store: dist.Store, *, rank: int, world_size: int) -> Member:
    """Open the connection that another rank keeps to rank 0. UserError where there is no way."""
    told = json.loads(store.get(_HUB))
    place = (told["address"] or os.environ["MASTER_ADDR"], int(told["port"]))
    try:
        return Member(
            place,
            rank=rank,
            world_size=world_size,
            token=told["token"],
            patience=_LONGEST_SILENCE,
        )
    except OSError as error:
        raise UserError(
            f"{socket.gethostname()} cannot reach rank 0 at {place[0]}, port {place[1]} "
            f"({error}); open the ports between the nodes, which links and gloo need too"
        ) from error


def agree_on_addresses(
    agreement: Agreement, member: Member | None, *, rank: int, error: UserError | None
) -> str:
    """The address by which ranks of other hosts reach this one; `error` is why it has no `member`.

    gloo takes the interface that has it, unless the user has named one. By itself it takes the
    one that the host's name resolves to, which may be the loopback interface, or none.
    """
    way = None if member is None else [member.own_address, member.hub_address]
    said = agreement.exchange("ways to rank 0", payload={"way": way}, error=error)
    ways = [None if payload["way"] is None else Way(*payload["way"]) for payload in said]
    own = own_address(ways, rank)
    interface = interface_with(own)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return own
