"""Opening a link over RDMA: the two ends agree on their rails, and carriers join their rings."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from hetero.device.device import Device, PeerMemory
from hetero.device.driver import GpuDriver, driver_for
from hetero.device.gpu import index_of
from hetero.device.topology import SYS, pci_device
from hetero.errors import LinkError
from hetero.link.carried_ends import host_memory, make_ends, side_of
from hetero.link.carrier import CarriedMemory, Carrier, ConnectionInfo
from hetero.link.control import Control
from hetero.link.handshake import Rendezvous, receive_json, send_json
from hetero.link.rdma_ports import Port, choose_devices, find_ports, pair_ports
from hetero.link.ring import CONTROL_BYTES
from hetero.link.ring_link import RingLink, agree
from hetero.link.tcp_connections import TcpPaths, open_connections

T = TypeVar("T")
DEVICE, HOST = "device", "host"
_LONGEST_STALL = 20.0

_log = logging.getLogger(__name__)


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
    sys_root: Path = SYS
    """Where the kernel describes this side's devices."""


class Together:
    """Steps that both ends take at once: an error of either is an error of both."""

    def __init__(self, connection: socket.socket, rendezvous: Rendezvous) -> None:
        self._connection = connection
        self._rendezvous = rendezvous

    def take(
        self, step: Callable[[], T], tell: Callable[[T], Mapping[str, Any]]
    ) -> tuple[T, dict[str, Any]]:
        """Take this side's part of a step; what came of it, and what the other side tells."""
        peer = self._rendezvous.description.peer
        try:
            mine = step()
        except Exception as error:
            reason = str(error) or type(error).__name__
            send_json(self._connection, {"error": reason})
            raise self._rendezvous.failure(reason, f"rank {peer} has been told") from error
        send_json(self._connection, tell(mine))
        try:
            theirs = receive_json(self._connection)
        except OSError as error:
            raise self._rendezvous.failure(f"rank {peer} ended ({error})", "see its log") from error
        if "error" in theirs:
            raise self._rendezvous.failure(f"rank {peer} says: {theirs['error']}", "see there")
        return mine, theirs


@dataclass(frozen=True)
class _Prepared:
    """What one end has made before it knows of the other's."""

    memory: CarriedMemory
    carrier: Carrier
    connections: list[ConnectionInfo]
    registered: list[str]
    """How the NIC of each port knows the rings' memory."""


def open_verbs(
    rendezvous: Rendezvous,
    *,
    transport: str,
    ring_bytes: int,
    chunk_bytes: int,
    ordered: Device,
    device: torch.device,
    options: VerbsOptions,
) -> RingLink:
    """Open one link. Collective between the two ends; either may have its own options.

    Raises LinkError, on both sides, with the first reason that either side met.

    Args:
        ring_bytes: of one direction.
        chunk_bytes: the largest part of a message that is handed over at once.
    """
    with ExitStack() as stack:
        paths = TcpPaths(addresses=(options.address,), connections=0)
        connection = open_connections(rendezvous, paths, stack).control[0]
        agree(
            connection,
            rendezvous,
            transport=transport,
            ring_bytes=ring_bytes,
            chunk_bytes=chunk_bytes,
            device=ordered,
        )
        together = Together(connection, rendezvous)
        ports = _agree_on_ports(together, rendezvous, options, device)

        def prepare() -> _Prepared:
            _require_room(ports, min(chunk_bytes, ring_bytes // 2))
            memory = _make_memory(ring_bytes, ordered, device, options, stack)
            carrier = Carrier(
                memory,
                side=side_of(rendezvous),
                stall_seconds=options.stall_seconds
                or min(rendezvous.description.timeout / 2, _LONGEST_STALL),
            )
            stack.callback(carrier.close)
            carrier.follow(ordered)
            rails = [carrier.add_verbs_rail(port) for port in ports]
            return _Prepared(
                memory, carrier, [info for info, _ in rails], [how for _, how in rails]
            )

        prepared, told = together.take(
            prepare, lambda made: {"connections": [asdict(info) for info in made.connections]}
        )
        theirs = [ConnectionInfo(**info) for info in told["connections"]]
        together.take(lambda: _connect(prepared.carrier, theirs), lambda _: {"connected": True})
        ends = make_ends(
            rendezvous,
            prepared.memory,
            prepared.carrier,
            Control(connection),
            transport=transport,
            rails=[str(port) for port in ports],
            stack=stack,
        )
    link = RingLink(
        rendezvous.description,
        transport=transport,
        ends=ends,
        device=ordered,
        chunk_bytes=chunk_bytes,
    )
    visibility = _visibility(prepared.memory, options)
    link.detail = f"a NIC's writes are made visible by {visibility}"
    rails = ", ".join(
        f"{port} (by {how})" for port, how in zip(ports, prepared.registered, strict=True)
    )
    _log.info("%s: over %s", rendezvous.description, rails)
    return link


def _agree_on_ports(
    together: Together,
    rendezvous: Rendezvous,
    options: VerbsOptions,
    device: torch.device,
) -> list[Port]:
    """This side's port of every rail, in one order on both sides."""
    ours, told = together.take(
        lambda: _usable_ports(options, device),
        lambda found: {"ports": [asdict(port) for port in found]},
    )
    theirs = [Port(**port) for port in told["ports"]]
    if rendezvous.listens:
        chosen = [ours[mine] for mine, _ in pair_ports(ours, theirs)]
    else:
        chosen = [ours[mine] for _, mine in pair_ports(theirs, ours)]
    if not chosen:
        raise rendezvous.failure(
            f"no RDMA port of this side ({', '.join(map(str, ours))}) can reach one of the other "
            f"({', '.join(map(str, theirs))}): one side is on InfiniBand and the other on Ethernet",
            "name NICs of one fabric with --hetero-nics",
        )
    return chosen


def _usable_ports(options: VerbsOptions, device: torch.device) -> list[Port]:
    """This side's ports that can be used. Only now, so that the peer hears why not."""
    gpu = None
    if device.type == "cuda" and not options.nics:
        gpu = pci_device(driver_for(device).pci_bus_id(index_of(device)))
    devices = choose_devices(gpu, options.nics, sys_root=options.sys_root)
    return find_ports(devices, sys_root=options.sys_root)


def _require_room(ports: Sequence[Port], nbytes: int) -> None:
    """Raises LinkError where a port carries no chunk of so many bytes."""
    for port in ports:
        if nbytes > port.max_message:
            raise LinkError(
                f"{port} carries messages of {port.max_message} bytes at most and a chunk has "
                f"{nbytes}; choose smaller chunks"
            )


def _visibility(memory: CarriedMemory, options: VerbsOptions) -> str:
    """What makes a NIC's writes visible at this side, in words."""
    if memory.reads_back:
        return "a read-back over the NIC"
    return "host memory" if options.memory == HOST else "the GPU itself"


def _connect(carrier: Carrier, connections: list[ConnectionInfo]) -> None:
    for index, connection in enumerate(connections):
        carrier.connect_verbs_rail(index, connection)
    # Receives are posted; the thread has nothing to send before the link is there.
    carrier.start()


def _make_memory(
    ring_bytes: int,
    ordered: Device,
    device: torch.device,
    options: VerbsOptions,
    stack: ExitStack,
) -> CarriedMemory:
    control, control_on_device = host_memory(CONTROL_BYTES, ordered, stack)
    make = partial(
        CarriedMemory,
        control,
        control_on_device,
        ring_bytes=ring_bytes,
        checksum_bytes=ordered.checksum_bytes,
    )
    if options.memory == HOST:
        rings, on_device = host_memory(2 * ring_bytes, ordered, stack)
        return make(rings.address, on_device, reads_back=options.read_back)
    driver = driver_for(device)
    index = index_of(device)
    if not isinstance(ordered, PeerMemory):
        raise LinkError("rings in device memory are for GPUs whose streams wait on memory")
    address, _ = ordered.allocate(2 * ring_bytes)
    stack.callback(ordered.free, address)
    dmabuf = _export(driver, index, address, 2 * ring_bytes)
    if dmabuf is not None:
        stack.callback(os.close, dmabuf[0])
    return make(
        address,
        address,
        reads_back=options.read_back or driver.remote_writes_need_flush(index),
        of_gpu=True,
        dmabuf=dmabuf,
    )


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
