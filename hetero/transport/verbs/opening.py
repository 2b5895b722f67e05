"""Opening a verbs link: the ends meet, agree on rails, register their rings and connect."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hetero.device.base import DeviceRuntime
from hetero.device.driver import driver_for
from hetero.device.topology import pci_device
from hetero.errors import LinkError
from hetero.transport.chunked import RingShape
from hetero.transport.handshake import (
    Meeting,
    accept,
    compare,
    connect,
    look_up,
    publish,
    receive_json,
    send_json,
)
from hetero.transport.header import PROTOCOL_VERSION
from hetero.transport.verbs.channel import Channel
from hetero.transport.verbs.control import Control
from hetero.transport.verbs.devices import Port, choose_devices, find_ports, pair_ports
from hetero.transport.verbs.ends import VerbsEnds, VerbsRecvEnd, VerbsSendEnd
from hetero.transport.verbs.library import Verbs, load
from hetero.transport.verbs.memory import DeviceMemory, device_buffer, host_buffer, index_of
from hetero.transport.verbs.rail import Ending, Rail
from hetero.transport.verbs.rings import Rings

_log = logging.getLogger(__name__)
T = TypeVar("T")
DEVICE, HOST = "device", "host"
_LONGEST_STALL = 20.0


@dataclass(frozen=True)
class VerbsOptions:
    """What one side may choose for itself."""

    memory: str = HOST
    """Where this side's rings are: DEVICE, which the NIC then reads and writes, or HOST."""
    nics: tuple[str, ...] = ()
    """RDMA devices, each with all its ports unless it ends in `:PORT`; else the nearest ones."""
    address: str = "127.0.0.1"
    """This side's address for the connection beside the rails."""
    stall_seconds: float | None = None
    """How long a request may take before its rail is given up; else half the link's timeout."""
    read_back: bool = False
    """Read a NIC's writes back over it even where the memory or its driver needs no such thing."""


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
        connection = stack.enter_context(_meet(meeting, options.address))
        connection.settimeout(meeting.timeout)
        compare(
            connection,
            meeting,
            {"protocol": PROTOCOL_VERSION, "slots": shape.slots, "slot_bytes": shape.slot_bytes},
        )
        together = _Together(connection, meeting)
        (library, ours), told = together.take(
            lambda: _look_around(verbs, options, device),
            lambda found: {"ports": [port.as_dict() for port in found[1]]},
        )
        ports = _pair(meeting, ours, [Port(**port) for port in told["ports"]])

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
        stall = options.stall_seconds or min(description.timeout / 2, _LONGEST_STALL)
        channel = Channel(
            library,
            rails,
            Control(connection),
            rings,
            name=f"verbs {description.rank}-{description.peer}",
            peer=description.peer,
            stall_seconds=stall,
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


class _Together:
    """Steps that both ends take at once: an error of either is an error of both."""

    def __init__(self, connection: socket.socket, meeting: Meeting) -> None:
        self._connection = connection
        self._meeting = meeting

    def take(
        self, step: Callable[[], T], tell: Callable[[T], Mapping[str, Any]]
    ) -> tuple[T, dict[str, Any]]:
        """Take this side's part of a step; what came of it, and what the other side tells."""
        peer = self._meeting.description.peer
        try:
            mine = step()
        except Exception as error:
            reason = str(error) or type(error).__name__
            send_json(self._connection, {"error": reason})
            raise self._meeting.failure(reason, f"rank {peer} has been told") from error
        send_json(self._connection, tell(mine))
        try:
            theirs = receive_json(self._connection)
        except OSError as error:
            raise self._meeting.failure(f"rank {peer} ended ({error})", "see its log") from error
        if "error" in theirs:
            raise self._meeting.failure(f"rank {peer} says: {theirs['error']}", "see there")
        return mine, theirs


def _meet(meeting: Meeting, address: str) -> socket.socket:
    if not meeting.listens:
        told = look_up(meeting, "verbs address")
        host, port = told["address"]
        return connect((str(host), int(port)), meeting, family=socket.AF_INET)
    with socket.create_server((address, 0)) as listener:
        publish(meeting, "verbs address", {"address": list(listener.getsockname())})
        return accept(listener, meeting)[0]


def _look_around(
    verbs: Verbs | None, options: VerbsOptions, device: torch.device
) -> tuple[Verbs, list[Port]]:
    """pyverbs, and this side's ports that can be used. Only now, so that the peer hears why not."""
    library = verbs or load()
    gpu = None
    if device.type == "cuda" and not options.nics:
        gpu = pci_device(driver_for(device).pci_bus_id(index_of(device)))
    return library, find_ports(library, choose_devices(gpu, options.nics))


def _pair(meeting: Meeting, ours: list[Port], theirs: list[Port]) -> list[Port]:
    """This side's port of every rail, in one order on both sides."""
    if meeting.listens:
        chosen = [ours[mine] for mine, _ in pair_ports(ours, theirs)]
    else:
        chosen = [ours[mine] for _, mine in pair_ports(theirs, ours)]
    if not chosen:
        raise meeting.failure(
            f"no RDMA port of this side ({', '.join(map(str, ours))}) can reach one of the other "
            f"({', '.join(map(str, theirs))}): one side is on InfiniBand and the other on Ethernet",
            "name NICs of one fabric with --hetero-nics",
        )
    return chosen


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
    rails = []
    for index, port in enumerate(ports):
        if shape.slot_bytes > port.max_message:
            raise LinkError(
                f"{port} carries messages of {port.max_message} bytes at most and a chunk has "
                f"{shape.slot_bytes}; choose smaller chunks"
            )
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
