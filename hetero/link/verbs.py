"""Links over RDMA, whose rails are ports of NICs that the two ends agree on."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from hetero.device.driver import GpuDriver, driver_for
from hetero.device.gpu import index_of
from hetero.device.topology import pci_device
from hetero.errors import LinkError
from hetero.link.carrier import Carrier, RingMemory, host_memory, host_rings, make_ends
from hetero.link.control import Control
from hetero.link.handshake import Rendezvous, receive_json, send_json
from hetero.link.nics import Nics, Port, find_ports, nearest_devices, pair_ports
from hetero.link.ring import CONTROL_BYTES, RingOptions, new_event
from hetero.link.ring_link import RingLink
from hetero.link.tcp import open_connections

T = TypeVar("T")
_MAX_STALL_SECONDS = 20.0
"""The time of a request after which its rail is lost: at most half the link's timeout."""

_log = logging.getLogger(__name__)


class JointSteps:
    """Steps that both ends run together: an error at one is an error at both."""

    def __init__(self, connection: socket.socket, rendezvous: Rendezvous) -> None:
        self._connection = connection
        self._rendezvous = rendezvous

    def run(
        self, step: Callable[[], T], describe: Callable[[T], Mapping[str, Any]]
    ) -> tuple[T, dict[str, Any]]:
        """Run this end's part of a step; returns its result and the other end's description."""
        peer = self._rendezvous.description.peer
        try:
            mine = step()
        except Exception as error:
            reason = str(error) or type(error).__name__
            send_json(self._connection, {"error": reason})
            raise self._rendezvous.failure(reason, f"rank {peer} has been told") from error
        send_json(self._connection, describe(mine))
        try:
            theirs = receive_json(self._connection)
        except OSError as error:
            raise self._rendezvous.failure(f"rank {peer} ended ({error})", "see its log") from error
        if "error" in theirs:
            raise self._rendezvous.failure(f"rank {peer} says: {theirs['error']}", "see there")
        return mine, theirs


def open_verbs(
    rendezvous: Rendezvous,
    ring: RingOptions,
    *,
    device: torch.device,
    nics: Nics,
    read_back: bool = False,
) -> RingLink:
    """Open one link for tensors on a device. Collective between the two ends.

    Raises LinkError at both ends, with the first error of either.

    Args:
        nics: this end's: an address, for the connection beside the rails, and RDMA devices, each
            with all its ports unless it ends in `:PORT`; without any, those nearest to the device.
        read_back: force read-backs where the memory does not need them.
    """
    with ExitStack() as stack:
        connections = open_connections(rendezvous, nics.addresses[:1], rails=0, stack=stack)
        connection = connections.control[0]
        ring.agree(connection, rendezvous)
        steps = JointSteps(connection, rendezvous)
        ports = _agree_on_ports(steps, rendezvous, nics.rdma, device)

        def prepare() -> tuple[RingMemory, Carrier, list[tuple[dict[str, Any], str]]]:
            _require_chunk_fits(ports, ring.entry_bytes)
            memory = _make_memory(ring, device, stack, read_back=read_back)
            stall_seconds = min(rendezvous.description.timeout / 2, _MAX_STALL_SECONDS)
            carrier = Carrier(memory, ring, side=rendezvous.side, stall_seconds=stall_seconds)
            stack.callback(carrier.close)
            return memory, carrier, [carrier.add_verbs_rail(port) for port in ports]

        (memory, carrier, rails), remote = steps.run(
            prepare, lambda made: {"connections": [connection for connection, _ in made[2]]}
        )
        steps.run(lambda: _connect(carrier, remote["connections"]), lambda _: {"connected": True})
        ends = make_ends(
            rendezvous,
            ring,
            memory,
            carrier,
            Control(connection),
            rails=[str(port) for port in ports],
            stack=stack,
        )
    link = RingLink(rendezvous.description, ring, ends)
    link.detail = f"a NIC's writes are made visible by {_visibility(memory)}"
    names = ", ".join(f"{port} (by {how})" for port, (_, how) in zip(ports, rails, strict=True))
    _log.info("%s: over %s", rendezvous.description, names)
    return link


def _agree_on_ports(
    steps: JointSteps,
    rendezvous: Rendezvous,
    nics: Sequence[str],
    device: torch.device,
) -> list[Port]:
    """This end's port of each rail, in the same order at both ends."""
    ours, remote = steps.run(
        lambda: _usable_ports(nics, device),
        lambda found: {"ports": [asdict(port) for port in found]},
    )
    theirs = [Port(**port) for port in remote["ports"]]
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


def _usable_ports(nics: Sequence[str], device: torch.device) -> list[Port]:
    """This end's usable ports. Call it in a joint step, so that the peer gets its error."""
    gpu = None
    if device.type == "cuda" and not nics:
        gpu = pci_device(driver_for(device).pci_bus_id(index_of(device)))
    return find_ports(nics or nearest_devices(gpu))


def _require_chunk_fits(ports: Sequence[Port], nbytes: int) -> None:
    """Raises LinkError if a port's largest message is smaller than a chunk."""
    for port in ports:
        if nbytes > port.max_message:
            raise LinkError(
                f"{port} carries messages of {port.max_message} bytes at most and a chunk has "
                f"{nbytes}; choose smaller chunks"
            )


def _visibility(memory: RingMemory) -> str:
    """For the log: the mechanism that makes a NIC's writes visible at this end."""
    if memory.reads_back:
        return "a read-back over the NIC"
    return "the GPU itself" if memory.is_gpu_memory else "host memory"


def _connect(carrier: Carrier, connections: list[dict[str, Any]]) -> None:
    for index, connection in enumerate(connections):
        carrier.connect_verbs_rail(index, connection)
    # After posting receives: the peer may send from here on.
    carrier.start()


def _make_memory(
    ring: RingOptions, device: torch.device, stack: ExitStack, *, read_back: bool
) -> RingMemory:
    """The rings in the device's memory, which the NIC then reads and writes, or in the host's."""
    if ring.transport == "verbs-host" or device.type == "cpu":
        return host_rings(ring, stack, reads_back=read_back)
    driver, index = driver_for(device), index_of(device)
    control, control_on_device = host_memory(CONTROL_BYTES, ring.device, stack)
    address, _ = ring.device.allocate(2 * ring.ring_bytes)
    stack.callback(ring.device.free, address)
    dmabuf = _export(driver, index, address, 2 * ring.ring_bytes)
    if dmabuf[0] >= 0:
        stack.callback(os.close, dmabuf[0])
    return RingMemory(
        control,
        control_on_device,
        address,
        address,
        new_event(stack),
        reads_back=read_back or driver.remote_writes_need_flush(index),
        is_gpu_memory=True,
        dmabuf=dmabuf,
    )


def _export(driver: GpuDriver, device: int, address: int, nbytes: int) -> tuple[int, int]:
    """A dma-buf and the offset in it; -1 if the memory can only be registered by address."""
    if not driver.can_export_dmabuf(device):
        return -1, 0
    try:
        with driver.on_device(device):
            return driver.export_dmabuf(address, nbytes)
    except LinkError as error:
        _log.info("no dma-buf of GPU %d: %s", device, error)
        return -1, 0
