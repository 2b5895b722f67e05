"""Opening a link over RDMA: the two ends agree on their rails, and carriers join their rings."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from ctypes import CDLL
from dataclasses import dataclass, replace
from typing import Any

import torch

from hetero.device.driver import GpuDriver, driver_for
from hetero.device.ordered import GpuMemory, OrderedDevice
from hetero.errors import LinkError
from hetero.link.carried_ends import (
    CarriedMemory,
    control_memory,
    host_memory,
    make_ends,
    side_of,
)
from hetero.link.carrier import Carrier, ConnectionInfo, RingMemory
from hetero.link.control import Control
from hetero.link.handshake import Meeting, compare
from hetero.link.header import PROTOCOL_VERSION
from hetero.link.rdma_ports import Port
from hetero.link.ring_link import OrderedLink
from hetero.link.verbs_joining import (
    HOST,
    Together,
    VerbsOptions,
    agree_on_ports,
    meet,
    require_room,
)
from hetero.native.library import native

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Prepared:
    """What one end has made before it knows of the other's."""

    memory: CarriedMemory
    carrier: Carrier
    connections: list[ConnectionInfo]
    registered: list[str]
    """How the NIC of each port knows the rings' memory."""

    def told(self) -> dict[str, Any]:
        return {"connections": [connection.as_dict() for connection in self.connections]}


def open_verbs(
    meeting: Meeting,
    *,
    transport: str,
    ring_bytes: int,
    chunk_bytes: int,
    ordered: OrderedDevice,
    device: torch.device,
    options: VerbsOptions,
    library: CDLL | None = None,
) -> OrderedLink:
    """Open one link. Collective between the two ends; either may have its own options.

    Raises LinkError, on both sides, with the first reason that either side met.

    Args:
        ring_bytes: of one direction.
        chunk_bytes: the largest part of a message that is handed over at once.
        library: stands in for the project's own.
    """
    library = library or native()
    with ExitStack() as stack:
        connection = stack.enter_context(meet(meeting, options.address))
        connection.settimeout(meeting.timeout)
        agreed = {
            "protocol": PROTOCOL_VERSION,
            "ring_bytes": ring_bytes,
            "chunk_bytes": chunk_bytes,
            "checksum_bytes": ordered.checksum_bytes,
        }
        compare(connection, meeting, agreed)
        together = Together(connection, meeting)
        ports = agree_on_ports(together, meeting, options, device=device, library=library)

        def prepare() -> _Prepared:
            require_room(ports, min(chunk_bytes, ring_bytes // 2))
            memory = _make_memory(ring_bytes, ordered, device, options, stack)
            return _make_carrier(library, memory, ports, meeting, options, ordered, stack)

        prepared, told = together.take(prepare, _Prepared.told)
        theirs = [ConnectionInfo.of(info) for info in told["connections"]]
        together.take(lambda: _connect(prepared.carrier, theirs), lambda _: {"connected": True})
        ends = make_ends(
            meeting,
            prepared.memory,
            prepared.carrier,
            Control(connection),
            transport=transport,
            rails=[str(port) for port in ports],
            stack=stack,
        )
    link = OrderedLink(
        meeting.description, transport=transport, ends=ends, device=ordered, chunk_bytes=chunk_bytes
    )
    visibility = _visibility(prepared.memory, options)
    link.remark = f"a NIC's writes are made visible by {visibility}"
    rails = ", ".join(
        f"{port} (by {how})" for port, how in zip(ports, prepared.registered, strict=True)
    )
    _log.info("%s: over %s", meeting.description, rails)
    return link


def _make_carrier(
    library: CDLL,
    memory: CarriedMemory,
    ports: Sequence[Port],
    meeting: Meeting,
    options: VerbsOptions,
    ordered: OrderedDevice,
    stack: ExitStack,
) -> _Prepared:
    carrier = Carrier(
        library,
        memory.for_carrier,
        side=side_of(meeting),
        stall_seconds=options.stall_within(meeting.description.timeout),
    )
    stack.callback(carrier.close)
    carrier.follow(ordered)
    rails = [carrier.add_verbs_rail(port) for port in ports]
    return _Prepared(memory, carrier, [info for info, _ in rails], [how for _, how in rails])


def _visibility(memory: CarriedMemory, options: VerbsOptions) -> str:
    """What makes a NIC's writes visible at this side, in words."""
    if memory.for_carrier.reads_back:
        return "a read-back over the NIC"
    return "host memory" if options.memory == HOST else "the GPU itself"


def _connect(carrier: Carrier, connections: list[ConnectionInfo]) -> None:
    for index, connection in enumerate(connections):
        carrier.connect_verbs_rail(index, connection)
    # Receives are posted; the thread has nothing to send before the link is there.
    carrier.start()


def _make_memory(
    ring_bytes: int,
    ordered: OrderedDevice,
    device: torch.device,
    options: VerbsOptions,
    stack: ExitStack,
) -> CarriedMemory:
    control, control_on_device = control_memory(ordered, stack)
    for_carrier = RingMemory(
        rings=0,
        ring_bytes=ring_bytes,
        control=control.address,
        reads_back=options.read_back,
        checksum_bytes=ordered.checksum_bytes,
    )
    if options.memory == HOST:
        rings, on_device = host_memory(2 * ring_bytes, ordered, stack)
        for_carrier = replace(for_carrier, rings=rings.address)
        return CarriedMemory(control, control_on_device, on_device, for_carrier)
    driver = driver_for(device)
    index = index_of(device)
    if not isinstance(ordered, GpuMemory):
        raise LinkError("rings in device memory are for GPUs whose streams wait on memory")
    address, _ = ordered.allocate(2 * ring_bytes)
    stack.callback(ordered.free, address)
    dmabuf = _export(driver, index, address, 2 * ring_bytes)
    if dmabuf is not None:
        stack.callback(os.close, dmabuf[0])
    for_carrier = replace(
        for_carrier,
        rings=address,
        reads_back=options.read_back or driver.remote_writes_need_flush(index),
        of_gpu=True,
        dmabuf=dmabuf,
    )
    return CarriedMemory(control, control_on_device, address, for_carrier)


def index_of(device: torch.device) -> int:
    """The number of a GPU."""
    return torch.cuda.current_device() if device.index is None else device.index


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
