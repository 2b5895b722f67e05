"""The one ladder of choices: which transports two ends can use, and how the link is opened.

The two ends try the paths of a family in one order, fastest first. A path is taken when both have
opened it, sent each other a few messages that span chunks, and found every byte as it should be.
Otherwise both leave it, knowing why, and try the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch

from hetero.addresses import is_loopback
from hetero.device.device import Device
from hetero.device.gpu import GpuDevice, index_of
from hetero.device.host import HostDevice
from hetero.errors import LinkError
from hetero.link.base import Link, LinkCounters
from hetero.link.handshake import Rendezvous, exchange
from hetero.link.names import FAMILIES
from hetero.link.rdma_ports import why_no_rdma
from hetero.link.same_host import open_same_host
from hetero.link.shared_memory import host_identity
from hetero.link.tcp import open_tcp
from hetero.link.tcp_connections import TcpPaths
from hetero.link.verbs import DEVICE, HOST, VerbsOptions, open_verbs
from hetero.native.binding import native

_log = logging.getLogger(__name__)
_ON_CPU = "the tensors are on a CPU"
_CHECKSUM = "--hetero-checksum needs the CPU to see every byte"
# Handing a chunk over costs some microseconds: less than a copy by the host, not than a device's.
_HOST_CHUNK_BYTES = 4 << 20
_CARRIED_CHUNK_BYTES = 2 << 20
_TCP_CHUNK_BYTES = 1 << 20
_PROBE_SECONDS = 20.0
PROBE_SIZES = (1, (2 << 20) + 1, 6 << 20)
"""Bytes of the messages that a link exchanges in each direction before it is used."""
_PERIOD = 65_521
"""A prime, so that no two chunks of a message hold the same."""


@dataclass(frozen=True)
class ChannelOptions:
    """What a user may set of a link; the same on both sides but for the addresses and devices."""

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
class Capabilities:
    """What one end knows of itself that decides which paths may be tried."""

    host: dict[str, str]
    gpu: dict[str, str] | None
    """Vendor and identity of its GPU; None for CPU tensors."""
    unordered: str | None
    """Why its GPU's streams cannot wait on words of memory, or may not; None if they can."""
    rdma_missing: str | None
    """Why it cannot use RDMA; None if it can."""
    addresses: tuple[str, ...] = ()
    """By which other hosts can reach it."""

    @classmethod
    def here(cls, *, device: torch.device, options: ChannelOptions) -> Capabilities:
        native()  # where it cannot be used no path can: that is one error, not one of each path
        host, addresses = host_identity(), options.addresses
        if device.type == "cpu":
            return cls(host, None, _ON_CPU, why_no_rdma(), addresses)
        gpu = GpuDevice(device)
        unordered = _CHECKSUM if options.checksum else gpu.why_unordered()
        return cls(host, gpu.identity(), unordered, why_no_rdma(), addresses)


@dataclass(frozen=True)
class PeerCapabilities:
    """What both ends know of themselves. Each end comes to the same answers."""

    here: Capabilities
    there: Capabilities

    @classmethod
    def of(
        cls, rendezvous: Rendezvous, *, device: torch.device, options: ChannelOptions
    ) -> PeerCapabilities:
        """Tell the other end what this one can do, and hear the same. Collective."""
        here = Capabilities.here(device=device, options=options)
        return cls(here, Capabilities(**exchange(rendezvous, "situation", asdict(here))))

    @property
    def share_memory(self) -> bool:
        return self.here.host == self.there.host

    @property
    def unordered(self) -> str | None:
        """Why the two GPUs cannot wait on memory: a word that one writes wakes no thread."""
        return self.here.unordered or self.there.unordered

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

    def unavailable_reason(self, path: str) -> str | None:
        """Why a path need not even be tried."""
        here, there = self.here, self.there
        if path not in ("ipc", "shm") and (unreachable := self._unreachable()):
            return unreachable
        if path in ("ipc", "shm") and not self.share_memory:
            return "the two ends run on different hosts"
        if path in ("verbs", "verbs-host") and (missing := here.rdma_missing or there.rdma_missing):
            return missing
        if path == "ipc":
            if here.gpu is None or there.gpu is None:
                return f"it joins GPUs, and {_ON_CPU}"
            if here.gpu["vendor"] != there.gpu["vendor"]:
                return "the two GPUs are of different vendors"
        if path == "ipc" or (path == "verbs" and here.gpu and there.gpu):
            return self.unordered
        return None


@dataclass(frozen=True)
class Choice:
    """The link that was taken, and what was said about the faster ones."""

    link: Link
    rejected: tuple[str, ...]
    is_last_resort: bool = False

    def __str__(self) -> str:
        reasons = "; ".join(self.rejected) or "the fastest there is"
        detail = f", {self.link.detail}" if self.link.detail else ""
        line = f"{self.link.description}: {self.link.transport}{detail} ({reasons})"
        if not self.is_last_resort:
            return line
        return (
            f"warning: {line}; every other way failed, and this one is much slower: mend what the "
            "reasons name, or ask for --hetero-transport gloo"
        )


def open_link(
    transport: str,
    rendezvous: Rendezvous,
    *,
    options: ChannelOptions,
    device: torch.device,
    last_resort: Callable[[], Link] | None = None,
) -> Choice:
    """Open a link over a path, or over the first path of a family that works.

    Collective between the two ends. Where there is none it raises LinkError on both, but the family
    `auto` takes `last_resort`, if it is given one.
    """
    capabilities = PeerCapabilities.of(rendezvous, device=device, options=options)
    if transport not in FAMILIES:
        opened = open_path(
            transport, rendezvous, capabilities=capabilities, options=options, device=device
        )
        return Choice(opened, rejected=())
    rejected: list[str] = []
    for path in FAMILIES[transport]:
        link, reason = _attempt(path, rendezvous, capabilities, options, device)
        if link is not None:
            return Choice(link, tuple(rejected))
        rejected.append(f"{path}: {reason}")
    if last_resort is None or transport != "auto":
        raise LinkError(
            f"{rendezvous.description} has no path of the kind that was asked for "
            f"({'; '.join(rejected)}); take --hetero-transport auto"
        )
    return Choice(last_resort(), tuple(rejected), is_last_resort=True)


def _attempt(
    path: str,
    rendezvous: Rendezvous,
    capabilities: PeerCapabilities,
    options: ChannelOptions,
    device: torch.device,
) -> tuple[Link | None, str | None]:
    """A link over one path that both ends have opened and probed; else why there is none."""
    if (reason := capabilities.unavailable_reason(path)) is not None:
        return None, reason
    attempt = replace(rendezvous, name=f"{rendezvous.name}/{path}", timeout=_PROBE_SECONDS)
    link: Link | None = None
    try:
        link = open_path(path, attempt, capabilities=capabilities, options=options, device=device)
        reason = _probe(link, device)
    except Exception as error:  # whatever keeps a path from working keeps it from being chosen
        reason = str(error) or type(error).__name__
    theirs = _exchange_verdict(attempt, reason)
    if reason is None and theirs is None:
        return link, None
    if link is not None:
        link.close()
    return None, reason or f"rank {rendezvous.description.peer} says {theirs}"


def _probe(link: Link, device: torch.device) -> str | None:
    """Exchange messages of a byte, and of several chunks and an odd byte, and compare them."""
    rank, peer = link.description.rank, link.description.peer
    for nbytes in PROBE_SIZES:
        sent = link.send(_pattern(rank, nbytes).to(device))
        received = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        link.recv(received).wait()
        sent.wait()
        arrived = torch.equal(received.cpu(), _pattern(peer, nbytes))
        link.check()
        if not arrived:
            return f"{nbytes} bytes arrived changed"
    # What the probe moved is not the run's.
    link.counters = LinkCounters()
    return None


def _pattern(rank: int, nbytes: int) -> torch.Tensor:
    """Random bytes, again and again: a tenth of a second for all that a rank probes, else."""
    generator = torch.Generator().manual_seed(rank + nbytes)
    period = torch.randint(0, 256, (_PERIOD,), dtype=torch.uint8, generator=generator, device="cpu")
    return period.repeat(-(-nbytes // _PERIOD))[:nbytes]


def _exchange_verdict(rendezvous: Rendezvous, reason: str | None) -> str | None:
    """Tell the other end this one's reason against the path; return the other's."""
    # The other end may still be waiting for what this one never sent.
    patient = replace(rendezvous, timeout=3 * _PROBE_SECONDS + rendezvous.description.timeout)
    verdict = exchange(patient, "verdict", {"reason": reason})["reason"]
    return None if verdict is None else str(verdict)


def open_path(
    path: str,
    rendezvous: Rendezvous,
    *,
    capabilities: PeerCapabilities,
    options: ChannelOptions,
    device: torch.device,
) -> Link:
    """Open a link over one path. Collective between the two ends; LinkError if it cannot be."""
    if (reason := capabilities.unavailable_reason(path)) is not None:
        raise LinkError(
            f"{rendezvous.description} cannot use {path}: {reason}; take --hetero-transport auto"
        )
    try:
        link = _open(path, rendezvous, capabilities=capabilities, options=options, device=device)
    except OSError as error:
        peer = rendezvous.description.peer
        raise rendezvous.failure(
            f"{path} ended while it was being opened ({error})", f"see the log of rank {peer}"
        ) from error
    if capabilities.unordered is not None and device.type != "cpu":
        why = f"copied by CPU threads ({capabilities.unordered})"
        link.detail = "; ".join(filter(None, (link.detail, why)))
    link.device = device if device.type == "cpu" else torch.device("cuda", index_of(device))
    if link.detail:
        _log.info("%s over %s: %s", rendezvous.description, path, link.detail)
    return link


def _open(
    path: str,
    rendezvous: Rendezvous,
    *,
    capabilities: PeerCapabilities,
    options: ChannelOptions,
    device: torch.device,
) -> Link:
    ordered: Device = (
        GpuDevice(device)
        if capabilities.unordered is None
        else HostDevice(device, checksum=options.checksum)
    )
    ring_bytes = options.ring_bytes // 2
    if path in ("ipc", "shm"):
        chunk_bytes = _HOST_CHUNK_BYTES if path == "shm" else options.ring_bytes // 4
        return open_same_host(
            rendezvous,
            transport=path,
            ring_bytes=ring_bytes,
            chunk_bytes=options.chunk_bytes or chunk_bytes,
            device=ordered,
        )
    if path == "tcp":
        return open_tcp(
            rendezvous,
            ring_bytes=ring_bytes,
            chunk_bytes=options.chunk_bytes or _TCP_CHUNK_BYTES,
            device=ordered,
            paths=TcpPaths(addresses=options.addresses, connections=options.connections),
        )
    return open_verbs(
        rendezvous,
        transport=path,
        ring_bytes=ring_bytes,
        chunk_bytes=options.chunk_bytes or _CARRIED_CHUNK_BYTES,
        ordered=ordered,
        device=device,
        options=VerbsOptions(
            memory=DEVICE if path == "verbs" and device.type != "cpu" else HOST,
            nics=options.rdma_devices,
            address=options.addresses[0],
        ),
    )
