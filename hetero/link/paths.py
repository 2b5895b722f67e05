"""Every path of the channel: what it is called, what stands in its way, and how it is opened."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hetero.addresses import is_loopback
from hetero.device.gpu_ordered import GpuOrderedDevice
from hetero.device.host import HostDevice
from hetero.device.ordered import OrderedDevice
from hetero.errors import LinkError
from hetero.link.base import Link
from hetero.link.handshake import Meeting, exchange
from hetero.link.rdma_available import no_rdma
from hetero.link.same_host import RingMemory, open_ordered
from hetero.link.shared_memory import host_identity
from hetero.link.tcp import open_tcp
from hetero.link.tcp_connections import TcpPaths
from hetero.link.verbs import open_verbs
from hetero.link.verbs_joining import DEVICE, HOST, VerbsOptions

_log = logging.getLogger(__name__)
_ON_CPU = "the tensors are on a CPU"
_CHECKSUM = "--hetero-checksum needs the CPU to see every byte"
# Handing a chunk over costs some microseconds: less than a copy by the host, not than a device's.
_HOST_CHUNK_BYTES = 4 << 20
_CARRIED_CHUNK_BYTES = 2 << 20
_TCP_CHUNK_BYTES = 512 << 10


@dataclass(frozen=True)
class ChannelOptions:
    """What a user may set of a channel; the same on both sides."""

    ring_bytes: int = 64 << 20
    """Memory of one link, both directions together. The ring is its only buffer."""
    chunk_bytes: int | None = None
    """The largest part of a message that moves at once; None for what suits the path."""
    checksum: bool = False
    connections: int = 4
    """TCP connections of a link."""
    addresses: tuple[str, ...] = ("127.0.0.1",)
    """This side's addresses for TCP, one a network interface."""
    rdma_devices: tuple[str, ...] = ()
    """This side's RDMA devices; empty for those nearest to the GPU."""


@dataclass(frozen=True)
class Situation:
    """What one end knows of itself that decides which paths may be tried."""

    host: dict[str, Any]
    gpu: dict[str, str] | None
    """Vendor and identity of its GPU; None for CPU tensors."""
    unordered: str | None
    """Why its GPU's streams cannot wait on words of memory, or may not; None if they can."""
    no_rdma: str | None
    """Why it cannot use RDMA; None if it can."""
    addresses: tuple[str, ...] = ()
    """By which other hosts can reach it."""

    @classmethod
    def here(cls, *, device: torch.device, options: ChannelOptions) -> Situation:
        host, addresses = host_identity(), options.addresses
        if device.type == "cpu":
            return cls(host, None, _ON_CPU, no_rdma(), addresses)
        gpu = GpuOrderedDevice(device)
        unordered = _CHECKSUM if options.checksum else gpu.why_unordered()
        return cls(host, gpu.identity(), unordered, no_rdma(), addresses)


@dataclass(frozen=True)
class Pair:
    """Both ends' situations. Each end comes to the same answers."""

    here: Situation
    there: Situation

    @classmethod
    def of(cls, meeting: Meeting, *, device: torch.device, options: ChannelOptions) -> Pair:
        """Exchange situations. Collective between the two ends."""
        here = Situation.here(device=device, options=options)
        return cls(here, Situation(**exchange(meeting, "situation", asdict(here))))

    @property
    def share_memory(self) -> bool:
        return self.here.host == self.there.host and bool(self.here.host["futex"])

    @property
    def order_themselves(self) -> bool:
        """Whether the GPUs of both ends wait on memory: a word that one writes wakes no thread."""
        return self.here.unordered is None and self.there.unordered is None

    def _unreachable(self) -> str | None:
        """Why other hosts cannot reach an end's addresses; None where they can, or need not."""
        if self.here.host["network"] == self.there.host["network"]:
            return None
        for address in (*self.here.addresses, *self.there.addresses):
            if is_loopback(address):
                return (
                    f"an end is on another host and has only the loopback address {address} for "
                    "links: name its NICs with --hetero-nics"
                )
        return None

    def obstacle(self, path: str) -> str | None:
        """Why a path need not even be tried."""
        if path not in ("ipc", "shm") and (unreachable := self._unreachable()):
            return unreachable
        if path in ("ipc", "shm") and not self.share_memory:
            return "the two ends run on different hosts"
        if path in ("verbs", "verbs-host") and (missing := self.here.no_rdma or self.there.no_rdma):
            return missing
        if path == "ipc":
            if self.here.gpu is None or self.there.gpu is None:
                return f"it joins GPUs, and {_ON_CPU}"
            if self.here.gpu["vendor"] != self.there.gpu["vendor"]:
                return "the two GPUs are of different vendors"
        if path == "ipc" or (path == "verbs" and self.here.gpu and self.there.gpu):
            return self.here.unordered or self.there.unordered
        return None


def open_path(
    path: str, meeting: Meeting, *, pair: Pair, options: ChannelOptions, device: torch.device
) -> Link:
    """Open a link over one path. Collective between the two ends; LinkError if it cannot be."""
    if (obstacle := pair.obstacle(path)) is not None:
        raise LinkError(
            f"{meeting.description} cannot use {path}: {obstacle}; take --hetero-transport auto"
        )
    try:
        link = _open(path, meeting, pair=pair, options=options, device=device)
    except OSError as error:
        peer = meeting.description.peer
        raise meeting.failure(
            f"{path} ended while it was being opened ({error})", f"see the log of rank {peer}"
        ) from error
    if not pair.order_themselves and device.type != "cpu":
        reason = pair.here.unordered or pair.there.unordered
        link.remark = "; ".join(filter(None, (link.remark, f"copied by CPU threads ({reason})")))
    if link.remark:
        _log.info("%s over %s: %s", meeting.description, path, link.remark)
    return link


def _open(
    path: str, meeting: Meeting, *, pair: Pair, options: ChannelOptions, device: torch.device
) -> Link:
    ordered: OrderedDevice = (
        GpuOrderedDevice(device)
        if pair.order_themselves
        else HostDevice(device, checksum=options.checksum)
    )
    ring_bytes = options.ring_bytes // 2
    if path in ("ipc", "shm"):
        memory: RingMemory = "device" if path == "ipc" else "host"
        chunk_bytes = _HOST_CHUNK_BYTES if path == "shm" else options.ring_bytes // 4
        return open_ordered(
            meeting,
            memory=memory,
            ring_bytes=ring_bytes,
            chunk_bytes=options.chunk_bytes or chunk_bytes,
            device=ordered,
        )
    if path == "tcp":
        return open_tcp(
            meeting,
            ring_bytes=ring_bytes,
            chunk_bytes=options.chunk_bytes or _TCP_CHUNK_BYTES,
            device=ordered,
            paths=TcpPaths(addresses=options.addresses, connections=options.connections),
        )
    on_device = path == "verbs" and device.type != "cpu"
    return open_verbs(
        meeting,
        transport=path,
        ring_bytes=ring_bytes,
        chunk_bytes=options.chunk_bytes or _CARRIED_CHUNK_BYTES,
        ordered=ordered,
        device=device,
        options=VerbsOptions(
            memory=DEVICE if on_device else HOST,
            nics=options.rdma_devices,
            address=options.addresses[0],
        ),
    )
