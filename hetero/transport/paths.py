"""Every path of the channel: what it is called, what stands in its way, and how it is opened."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hetero.device.choose import runtime_for
from hetero.device.gpu_ordered import GpuOrderedDevice
from hetero.device.host import HostDevice
from hetero.errors import LinkError
from hetero.native.library import LIBRARY
from hetero.transport.base import Link
from hetero.transport.chunked import ChunkedLink, RingShape
from hetero.transport.handshake import Meeting, exchange
from hetero.transport.ordered.opening import RingMemory, open_ordered
from hetero.transport.same_host import host_identity
from hetero.transport.shm import ShmEnds, open_shm
from hetero.transport.tcp import TcpPaths, open_tcp
from hetero.transport.verbs.available import no_rdma
from hetero.transport.verbs.ends import VerbsEnds
from hetero.transport.verbs.joining import DEVICE, HOST, VerbsOptions
from hetero.transport.tcp.opening import open_tcp_rails
from hetero.transport.verbs.native.opening import open_native
from hetero.transport.verbs.opening import open_verbs

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 2 << 20
_ON_CPU = "the tensors are on a CPU"
_CHECKSUM = "--hetero-checksum needs the CPU to see every byte"
_ORDERED_CHUNK_BYTES = 4 << 20
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
    """TCP connections of each direction."""
    addresses: tuple[str, ...] = ("127.0.0.1",)
    """This side's addresses for TCP, one a network interface."""
    rdma_devices: tuple[str, ...] = ()
    """This side's RDMA devices; empty for those nearest to the GPU."""

    @property
    def shape(self) -> RingShape:
        """The rings of a path that a CPU thread drives."""
        chunk_bytes = self.chunk_bytes or _CHUNK_BYTES
        slots = self.ring_bytes // 2 // chunk_bytes
        return RingShape(slots=max(2, slots), slot_bytes=chunk_bytes)

    def ordered_chunk_bytes(self, memory: RingMemory) -> int:
        """Handing over costs some microseconds: less than a host copy, not than a device's."""
        if self.chunk_bytes is not None:
            return self.chunk_bytes
        return _ORDERED_CHUNK_BYTES if memory == "host" else self.ring_bytes // 4


@dataclass(frozen=True)
class Situation:
    """What one end knows of itself that decides which paths may be tried."""

    host: dict[str, Any]
    gpu: dict[str, str] | None
    """Vendor and identity of its GPU; None for CPU tensors."""
    unordered: str | None
    """Why its streams cannot wait on words of memory, or may not; None if they can."""
    no_rdma: str | None
    """Why it cannot use RDMA; None if it can."""
    no_forwarder: str | None = None
    """Why RDMA cannot be carried without Python there; None if it can."""

    @classmethod
    def here(cls, *, device: torch.device, options: ChannelOptions) -> Situation:
        if device.type == "cpu":
            return cls(
                host_identity(),
                gpu=None,
                unordered=_CHECKSUM if options.checksum else None,
                no_rdma=no_rdma(),
                no_forwarder=_ON_CPU,
            )
        gpu = GpuOrderedDevice(device)
        unordered = (
            _CHECKSUM
            if options.checksum
            else gpu.why_unordered()
        )
        lacking = no_rdma()
        return cls(
            host_identity(),
            gpu=gpu.identity(),
            unordered=unordered,
            no_rdma=lacking,
            no_forwarder=None,
        )


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
        return self.share_memory and self.here.unordered is None and self.there.unordered is None

    @property
    def why_python(self) -> str | None:
        """Why Python carries an RDMA link between the two; None if the native forwarder does."""
        ends = sorted((self.here, self.there), key=repr)
        reasons = [reason for end in ends for reason in (end.unordered, end.no_forwarder)]
        return next((reason for reason in reasons if reason is not None), None)

    def obstacle(self, path: str) -> str | None:
        """Why a path need not even be tried."""
        if path in ("ipc", "shm") and not self.share_memory:
            return "the two ends run on different hosts"
        if path in ("verbs", "verbs-host"):
            return self.here.no_rdma or self.there.no_rdma
        if path == "ipc":
            if self.here.gpu is None or self.there.gpu is None:
                return f"it joins GPUs, and {_ON_CPU}"
            if self.here.gpu["vendor"] != self.there.gpu["vendor"]:
                return "the two GPUs are of different vendors"
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
    if link.remark:
        _log.info("%s over %s: %s", meeting.description, path, link.remark)
    return link


def _open(
    path: str, meeting: Meeting, *, pair: Pair, options: ChannelOptions, device: torch.device
) -> Link:
    if path == "ipc":
        return _open_ordered(meeting, "device", options=options, device=device)
    if path == "shm" and pair.order_themselves:
        return _open_ordered(meeting, "host", options=options, device=device)
    if path == "shm":
        return _open_shm(meeting, options=options, device=device)
    if path in ("verbs", "verbs-host") and pair.why_python is None:
        return _open_native(path, meeting, options=options, device=device)
    if path in ("verbs", "verbs-host"):
        return _open_verbs(path, meeting, pair=pair, options=options, device=device)
    return _open_tcp(meeting, options=options, device=device)


def _open_ordered(
    meeting: Meeting, memory: RingMemory, *, options: ChannelOptions, device: torch.device
) -> Link:
    link = open_ordered(
        meeting,
        memory=memory,
        ring_bytes=options.ring_bytes // 2,
        chunk_bytes=options.ordered_chunk_bytes(memory),
        device=HostDevice() if device.type == "cpu" else GpuOrderedDevice(device),
    )
    if (reason := LIBRARY.why_not()) is not None:
        link.remark = f"each call of the GPU's driver is made by Python ({reason})"
    return link


def _open_shm(meeting: Meeting, *, options: ChannelOptions, device: torch.device) -> Link:
    ends = open_shm(meeting, shape=options.shape, runtime=runtime_for(device))
    return _over_rings("shm", ends, meeting, options=options, device=device)


def _open_native(
    path: str, meeting: Meeting, *, options: ChannelOptions, device: torch.device
) -> Link:
    return open_native(
        meeting,
        transport=path,
        ring_bytes=options.ring_bytes // 2,
        chunk_bytes=options.shape.slot_bytes,
        ordered=GpuOrderedDevice(device),
        device=device,
        options=_verbs_options(path, options, device),
    )


def _open_verbs(
    path: str, meeting: Meeting, *, pair: Pair, options: ChannelOptions, device: torch.device
) -> Link:
    ends = open_verbs(
        meeting,
        shape=options.shape,
        runtime=runtime_for(device),
        device=device,
        options=_verbs_options(path, options, device),
    )
    remark = f"carried by Python ({pair.why_python})"
    if path == "verbs":
        remark += f", writes are made visible by {ends.visibility}"
    return _over_rings(path, ends, meeting, options=options, device=device, remark=remark)


def _verbs_options(path: str, options: ChannelOptions, device: torch.device) -> VerbsOptions:
    on_device = path == "verbs" and device.type != "cpu"
    return VerbsOptions(
        memory=DEVICE if on_device else HOST,
        nics=options.rdma_devices,
        address=options.addresses[0],
    )


def _over_rings(
    path: str,
    ends: ShmEnds | VerbsEnds,
    meeting: Meeting,
    *,
    options: ChannelOptions,
    device: torch.device,
    remark: str = "",
) -> Link:
    return ChunkedLink(
        meeting.description,
        transport=path,
        remark=remark,
        send_end=ends.send,
        recv_end=ends.recv,
        device=device,
        checksum=options.checksum,
        on_close=ends.close,
    )


def _open_tcp(meeting: Meeting, *, options: ChannelOptions, device: torch.device) -> Link:
    if not options.checksum:
        return open_tcp_rails(
            meeting,
            ring_bytes=options.ring_bytes // 2,
            chunk_bytes=options.chunk_bytes or _TCP_CHUNK_BYTES,
            device=HostDevice() if device.type == "cpu" else GpuOrderedDevice(device),
            paths=TcpPaths(addresses=options.addresses, connections=options.connections),
        )
    return open_tcp(
        meeting,
        shape=options.shape,
        paths=TcpPaths(addresses=options.addresses, connections=options.connections),
        device=device,
        checksum=options.checksum,
    )
