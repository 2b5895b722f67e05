"""Links over the emulated NICs, for the tests that choose rails, rings and deadlines themselves."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hetero.device.host import HostDevice
from hetero.link.base import Link, LinkDescription
from hetero.link.handshake import Rendezvous
from hetero.link.ring_options import RingOptions
from hetero.link.verbs import open_verbs
from tests.hetero.link.transports import Transport
from tests.rdma.rails import Rail

SECRET = b"rdma"


def link_name(rank: int, store: dist.Store) -> str:
    """The next link's: both ranks open their links in one order."""
    return f"rdma/{store.add(f'opened by {rank}', 1)}"


def verbs_over(
    rails: Sequence[Rail], *, ring_bytes: int, chunk_bytes: int, read_back: bool = False
) -> Transport:
    """A transport, as the contract's harness opens it, over these rails alone."""
    nics = [tuple(rail.devices[rank] for rail in rails) for rank in range(2)]
    return Transport("verbs", functools.partial(_open, nics, ring_bytes, chunk_bytes, read_back))


def _open(
    nics: Sequence[tuple[str, ...]],
    ring_bytes: int,
    chunk_bytes: int,
    read_back: bool,
    description: LinkDescription,
    store: dist.Store,
    device: torch.device,
) -> Link:
    rendezvous = Rendezvous(
        store=store,
        description=description,
        name=link_name(description.rank, store),
        listens=description.rank == 0,
        secret=SECRET,
    )
    return open_verbs(
        rendezvous,
        RingOptions("verbs", ring_bytes, chunk_bytes, HostDevice(device)),
        device=device,
        nics=nics[description.rank],
        read_back=read_back,
    )


class Heard(logging.Handler):
    """What a process's links have said of their rails."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("hetero").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
