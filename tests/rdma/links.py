"""Links over the emulated NICs, for the tests that choose rails, rings and deadlines themselves."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hetero.device.choose import runtime_for
from hetero.transport.base import Link, LinkDescription
from hetero.transport.chunked import ChunkedLink, RingShape
from hetero.transport.handshake import Meeting
from hetero.transport.verbs.joining import VerbsOptions
from hetero.transport.verbs.native.opening import open_native
from hetero.transport.verbs.opening import open_verbs
from tests.emulated_streams import EmulatedOrderedDevice
from tests.hetero.transport.transports import Transport
from tests.rdma.rails import Rail


def verbs_over(rails: Sequence[Rail], *, slots: int, slot_bytes: int) -> Transport:
    """A transport, as the contract's harness opens it, over these rails alone, by Python."""
    nics = [tuple(rail.devices[rank] for rail in rails) for rank in range(2)]
    shape = RingShape(slots=slots, slot_bytes=slot_bytes)
    return Transport("verbs", functools.partial(_open, nics, shape))


def native_over(rails: Sequence[Rail], *, slots: int, slot_bytes: int) -> Transport:
    """The same by the native forwarder: rings as large, and parts as large as slots."""
    nics = [tuple(rail.devices[rank] for rail in rails) for rank in range(2)]
    return Transport("verbs-native", functools.partial(_open_native, nics, slots, slot_bytes))


def _meeting(description: LinkDescription, store: dist.Store) -> Meeting:
    return Meeting(
        store=store,
        description=description,
        name="rdma",
        listens=description.rank == 0,
        secret=b"rdma",
    )


def _open_native(
    nics: Sequence[tuple[str, ...]],
    slots: int,
    slot_bytes: int,
    description: LinkDescription,
    store: dist.Store,
    device: torch.device,
) -> Link:
    return open_native(
        _meeting(description, store),
        transport="verbs",
        ring_bytes=slots * slot_bytes,
        chunk_bytes=slot_bytes,
        ordered=EmulatedOrderedDevice(),
        device=device,
        options=VerbsOptions(nics=nics[description.rank]),
    )


def _open(
    nics: Sequence[tuple[str, ...]],
    shape: RingShape,
    description: LinkDescription,
    store: dist.Store,
    device: torch.device,
) -> Link:
    ends = open_verbs(
        _meeting(description, store),
        shape=shape,
        runtime=runtime_for(device),
        device=device,
        options=VerbsOptions(nics=nics[description.rank]),
    )
    return ChunkedLink(
        description,
        transport="verbs",
        send_end=ends.send,
        recv_end=ends.recv,
        device=device,
        on_close=ends.close,
    )


class Heard(logging.Handler):
    """What a process's links have said of their rails."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("hetero").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
