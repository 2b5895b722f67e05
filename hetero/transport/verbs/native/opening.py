"""Opening a verbs link that a native carrier carries between two devices' streams."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from ctypes import CDLL
from dataclasses import dataclass
from typing import Any

import torch

from hetero.device.driver import GpuDriver, driver_for
from hetero.device.ordered import OrderedDevice
from hetero.errors import LinkError
from hetero.transport.handshake import Meeting, compare
from hetero.transport.header import PROTOCOL_VERSION
from hetero.transport.ordered.link import OrderedLink
from hetero.transport.ordered.ring import CONTROL_BYTES, Direction
from hetero.transport.ordered.transfer import OrderedEnds
from hetero.transport.same_host import SharedMemory, make_memory
from hetero.transport.control import Control
from hetero.transport.verbs.devices import Port
from hetero.transport.verbs.joining import (
    HOST,
    Together,
    VerbsOptions,
    agree_on_ports,
    meet,
    require_room,
)
from hetero.transport.verbs.library import Verbs
from hetero.transport.verbs.memory import index_of
from hetero.transport.carried_ends import LocalEnd, RemoteEnd
from hetero.transport.carrier import Carrier, ConnectionInfo, RingMemory
from hetero.transport.failover import Watch
from hetero.native.library import LIBRARY

_log = logging.getLogger(__name__)
_CREDIT_SECONDS = 5.0


@dataclass(frozen=True)
class _Memory:
    """One end's memory, as its own code, its device and its NICs reach it."""

    control: SharedMemory
    control_on_device: int
    rings_on_device: int
    for_nics: RingMemory


@dataclass(frozen=True)
class _Prepared:
    """What one end has made before it knows of the other's."""

    memory: _Memory
    carrier: Carrier
    ports: list[Port]
    endings: list[ConnectionInfo]
    hows: list[str]
    """How the NIC of each port knows the rings' memory."""

    def told(self) -> dict[str, Any]:
        return {"endings": [ending.as_dict() for ending in self.endings]}


def open_native(
    meeting: Meeting,
    *,
    transport: str,
    ring_bytes: int,
    chunk_bytes: int,
    ordered: OrderedDevice,
    device: torch.device,
    options: VerbsOptions,
    verbs: Verbs | None = None,
    library: CDLL | None = None,
) -> OrderedLink:
    """Open one link. Collective between the two ends; either may have its own options.

    Raises LinkError, on both sides, with the first reason that either side met.

    Args:
        ring_bytes: of one direction.
        chunk_bytes: the largest part of a message that is handed over at once.
        verbs, library: stand in for the machine's own.
    """
    with ExitStack() as stack:
        connection = stack.enter_context(meet(meeting, options.address))
        connection.settimeout(meeting.timeout)
        agreed = {
            "protocol": PROTOCOL_VERSION,
            "carrier": "native",
            "ring_bytes": ring_bytes,
            "chunk_bytes": chunk_bytes,
        }
        compare(connection, meeting, agreed)
        together = Together(connection, meeting)
        _, ports = agree_on_ports(together, meeting, options, device=device, verbs=verbs)

        def prepare() -> _Prepared:
            require_room(ports, min(chunk_bytes, ring_bytes // 2))
            memory = _make_memory(ring_bytes, ordered, device, options, stack)
            return _make_carrier(library or LIBRARY.load(), memory, ports, meeting, options, stack)

        prepared, told = together.take(prepare, _Prepared.told)
        theirs = [ConnectionInfo.of(ending) for ending in told["endings"]]
        together.take(lambda: _connect(prepared.carrier, theirs), lambda _: {"connected": True})
        ends = _make_ends(prepared, Control(connection), meeting, transport, stack)
    link = OrderedLink(
        meeting.description, transport=transport, ends=ends, device=ordered, chunk_bytes=chunk_bytes
    )
    visibility = _visibility(prepared.memory, options)
    link.remark = f"carried by the native carrier, writes are made visible by {visibility}"
    carried_by = zip(ports, prepared.hows, strict=True)
    _log.info(
        "%s: over %s by the native carrier; a NIC's writes are visible by: %s",
        *(meeting.description, ", ".join(f"{port} ({how})" for port, how in carried_by)),
        visibility,
    )
    return link


def _make_carrier(
    library: CDLL,
    memory: _Memory,
    ports: list[Port],
    meeting: Meeting,
    options: VerbsOptions,
    stack: ExitStack,
) -> _Prepared:
    carrier = Carrier(
        library,
        memory.for_nics,
        side=_side(meeting),
        stall_seconds=options.stall_within(meeting.description.timeout),
    )
    stack.callback(carrier.close)
    rails = [carrier.add_verbs_rail(port) for port in ports]
    endings, hows = [ending for ending, _ in rails], [how for _, how in rails]
    return _Prepared(memory, carrier, ports, endings, hows)


def _make_ends(
    prepared: _Prepared, control: Control, meeting: Meeting, transport: str, stack: ExitStack
) -> OrderedEnds:
    """The ends of the link, which take over all that is on the stack."""
    memory, carrier, side = prepared.memory, prepared.carrier, _side(meeting)
    description = meeting.description
    remote = RemoteEnd(memory.control, 1 - side, carrier.wake)
    watch = Watch(
        carrier,
        control,
        rails=[str(port) for port in prepared.ports],
        peer_state=remote,
        name=f"{transport} {description.rank}-{description.peer}",
        peer=description.peer,
    )
    stack.callback(watch.close)
    local = LocalEnd(memory.control, side, watch.tell_fault)
    stack.callback(_settle, carrier, watch, local, remote)
    ring_bytes = memory.for_nics.ring_bytes
    return OrderedEnds(
        outgoing=Direction(memory.control, side, memory.control_on_device),
        incoming=Direction(memory.control, 1 - side, memory.control_on_device),
        mine=local,
        theirs=remote,
        outgoing_ring=memory.rings_on_device,
        incoming_ring=memory.rings_on_device + ring_bytes,
        ring_bytes=ring_bytes,
        peer_has_gone=watch.peer_has_gone,
        close=stack.pop_all().close,
    )


def _side(meeting: Meeting) -> int:
    return 0 if meeting.listens else 1


def _visibility(memory: _Memory, options: VerbsOptions) -> str:
    """What makes a NIC's writes visible at this side, in words."""
    if memory.for_nics.reads_back:
        return "a read-back over the NIC"
    return "host memory" if options.memory == HOST else "the GPU itself"


def _connect(carrier: Carrier, endings: list[ConnectionInfo]) -> None:
    for index, ending in enumerate(endings):
        carrier.connect_verbs_rail(index, ending)
    # Receives are posted; the thread has nothing to send before the link is there.
    carrier.start()


def _settle(carrier: Carrier, watch: Watch, local: LocalEnd, remote: RemoteEnd) -> None:
    """The peer must hear what was consumed here before this end is gone."""
    if not (local.has_failed or remote.has_failed) and not watch.peer_has_gone():
        carrier.settle_credits(_CREDIT_SECONDS)


def _make_memory(
    ring_bytes: int,
    ordered: OrderedDevice,
    device: torch.device,
    options: VerbsOptions,
    stack: ExitStack,
) -> _Memory:
    control, control_on_device = _host_memory(CONTROL_BYTES, ordered, stack)
    if options.memory == HOST:
        rings, on_device = _host_memory(2 * ring_bytes, ordered, stack)
        for_nics = RingMemory(
            rings=rings.address,
            ring_bytes=ring_bytes,
            control=control.address,
            reads_back=options.read_back,
        )
        return _Memory(control, control_on_device, on_device, for_nics)
    driver, index = driver_for(device), index_of(device)
    address, _ = ordered.allocate(2 * ring_bytes)
    stack.callback(ordered.free, address)
    dmabuf = _export(driver, index, address, 2 * ring_bytes)
    if dmabuf is not None:
        stack.callback(os.close, dmabuf[0])
    for_nics = RingMemory(
        rings=address,
        ring_bytes=ring_bytes,
        control=control.address,
        reads_back=options.read_back or driver.remote_writes_need_flush(index),
        of_gpu=True,
        dmabuf=dmabuf,
    )
    return _Memory(control, control_on_device, address, for_nics)


def _export(driver: GpuDriver, device: int, address: int, nbytes: int) -> tuple[int, int] | None:
    """A dma-buf and the offset in it; None where there is only the address to register by."""
    if not driver.can_export_dmabuf(device):
        return None
    try:
        with driver.on_device(device):
            return driver.export_dmabuf(address, nbytes)
    except LinkError as error:
        _log.info("no dma-buf of GPU %d: %s", device, error)
        return None


def _host_memory(nbytes: int, ordered: OrderedDevice, stack: ExitStack) -> tuple[SharedMemory, int]:
    descriptor = make_memory(nbytes)
    try:
        memory = SharedMemory(descriptor, nbytes)
    finally:
        os.close(descriptor)
    stack.callback(memory.close)
    address = ordered.register(memory.address, nbytes)
    stack.callback(ordered.unregister, memory.address)
    return memory, address
