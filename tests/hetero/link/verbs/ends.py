"""Both ends of a link over RDMA in one process, over NICs that are copies within it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hetero.device.device import Device
from hetero.device.host import HostDevice
from hetero.link.handshake import Rendezvous
from hetero.link.ring_link import RingLink
from hetero.link.verbs import HOST, VerbsOptions, open_verbs
from tests.hetero.link.joined import CPU, attempted, joined
from tests.loopback_nic.library import LoopbackNics

RING_BYTES = 64 << 10
CHUNK_BYTES = 16 << 10
STALL = 0.5


def _host_devices() -> tuple[Device, ...]:
    return HostDevice(CPU), HostDevice(CPU)


@dataclass(frozen=True)
class Setup:
    """How the two ends are opened."""

    nics: LoopbackNics
    names: tuple[tuple[str, ...], ...] = (("a0", "a1"), ("b0", "b1"))
    """Each end's NICs."""
    timeout: float = 20.0
    ring_bytes: tuple[int, int] = (RING_BYTES, RING_BYTES)
    chunk_bytes: int = CHUNK_BYTES
    read_back: bool = False
    memory: str = HOST
    devices: tuple[Device, ...] = field(default_factory=_host_devices)
    tensors_on: tuple[torch.device, ...] = (CPU, CPU)

    def open(self, rendezvous: Rendezvous) -> RingLink:
        rank = rendezvous.description.rank
        return open_verbs(
            rendezvous,
            transport="verbs",
            ring_bytes=self.ring_bytes[rank],
            chunk_bytes=self.chunk_bytes,
            ordered=self.devices[rank],
            device=self.tensors_on[rank],
            options=VerbsOptions(
                memory=self.memory,
                nics=self.names[rank],
                stall_seconds=STALL,
                read_back=self.read_back,
                sys_root=self.nics.sys_root,
            ),
        )

    @contextmanager
    def links(self) -> Iterator[tuple[RingLink, RingLink]]:
        """Both links, which are closed at the end in whatever state they are."""
        with joined(self.open, timeout=self.timeout) as links:
            yield links

    def errors(self) -> list[str]:
        """The texts of both ends' errors; opening must fail at both."""
        return attempted(self.open)
