"""Opening a verbs link: the ends meet, agree on rails, register their rings and connect."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import torch

from hetero.device.base import DeviceRuntime
from hetero.device.driver import driver_for
from hetero.errors import LinkError
from hetero.transport.chunked import RingShape
from hetero.transport.handshake import Meeting, compare
from hetero.transport.header import PROTOCOL_VERSION
from hetero.transport.verbs.channel import Channel
from hetero.transport.control import Control
from hetero.transport.verbs.devices import Port
from hetero.transport.verbs.ends import VerbsEnds, VerbsRecvEnd, VerbsSendEnd
from hetero.transport.verbs.joining import (
    HOST,
    Together,
    VerbsOptions,
    agree_on_ports,
    meet,
    require_room,
)
from hetero.transport.verbs.library import Verbs
from hetero.transport.verbs.memory import DeviceMemory, device_buffer, host_buffer
from hetero.transport.verbs.rail import Ending, Rail
from hetero.transport.verbs.rings import Rings

_log = logging.getLogger(__name__)


def open_verbs(
    meeting: Meeting,
    *,
    shape: RingShape,
    runtime: DeviceRuntime,
    device: torch.device,
    options: VerbsOptions,
    verbs: Verbs | None = None,
    driver: DeviceMemory | None = None,
) -> VerbsEnds:
    """Open both directions. Collective between the two ends; either may have its own options.

    Raises LinkError, on both sides, with the first reason that either side met. `verbs` and
    `driver` stand in for the machine's own.
    """
    with ExitStack() as stack:
        connection = stack.enter_context(meet(meeting, options.address))
        connection.settimeout(meeting.timeout)
        compare(
            connection,
            meeting,
            {"protocol": PROTOCOL_VERSION, "slots": shape.slots, "slot_bytes": shape.slot_bytes},
        )
        together = Together(connection, meeting)
        library, ports = agree_on_ports(together, meeting, options, device=device, verbs=verbs)

        def prepare() -> tuple[Rings, list[Rail]]:
            rings = _make_rings(shape, runtime, device, options, driver, stack)
            return rings, _make_rails(library, ports, rings, stack)

        (rings, rails), told = together.take(
            prepare,
            lambda made: {"endings": [_ending(rail, made[0]).as_dict() for rail in made[1]]},
        )
        endings = [Ending.of(ending) for ending in told["endings"]]
        together.take(lambda: _connect_all(rails, endings, library), lambda _: {"connected": True})
        # Both are ready to receive. Whatever is said from here on is between the channels.
        description = meeting.description
        channel = Channel(
            library,
            rails,
            Control(connection),
            rings,
            name=f"verbs {description.rank}-{description.peer}",
            peer=description.peer,
            stall_seconds=options.stall_within(description.timeout),
        )
        stack.callback(channel.close)
        carried_by = tuple(f"{rail.port} ({rail.how})" for rail in rails)
        _log.info(
            "%s: over %s; a NIC's writes are visible by: %s",
            *(description, ", ".join(carried_by), rings.visibility),
        )
        return VerbsEnds(
            send=VerbsSendEnd(channel),
            recv=VerbsRecvEnd(channel),
            rails=carried_by,
            visibility=rings.visibility,
            close=stack.pop_all().close,
        )


def _make_rings(
    shape: RingShape,
    runtime: DeviceRuntime,
    device: torch.device,
    options: VerbsOptions,
    driver: DeviceMemory | None,
    stack: ExitStack,
) -> Rings:
    total = 2 * shape.slots * shape.slot_bytes
    records = host_buffer(Rings.record_bytes(shape), runtime, stack)
    if options.memory == HOST:
        slots = host_buffer(total, runtime, stack)
        return Rings(shape, slots, records, reads_back=options.read_back)
    slots = device_buffer(total, device, driver or driver_for(device), stack)
    if options.read_back or not runtime.make_remote_writes_visible():
        return Rings(shape, slots, records, reads_back=True)
    return Rings(shape, slots, records, visible=runtime.make_remote_writes_visible)


def _make_rails(verbs: Verbs, ports: list[Port], rings: Rings, stack: ExitStack) -> list[Rail]:
    shape = rings.shape
    require_room(ports, shape.slot_bytes)
    rails = []
    for index, port in enumerate(ports):
        rail = Rail(
            verbs,
            port,
            index=index,
            rings=rings,
            # Half the slots are under way at once; the other half is being filled or emptied.
            depth=max(2, shape.slots // (2 * len(ports))),
            # A chunk a slot, a credit for each, and a chunk a slot that another rail had brought.
            receives=3 * shape.slots + 2,
        )
        stack.callback(rail.close)
        rails.append(rail)
    return rails


def _ending(rail: Rail, rings: Rings) -> Ending:
    return rail.ending(slots_from=rings.receiving, records_from=rings.receiving_records)


def _connect_all(rails: list[Rail], endings: list[Ending], verbs: Verbs) -> None:
    for rail, ending in zip(rails, endings, strict=True):
        try:
            rail.connect(ending)
        except verbs.error as error:
            raise LinkError(
                f"{rail.port} cannot be connected with {Port(**ending.port)} of the peer ({error})"
            ) from error
