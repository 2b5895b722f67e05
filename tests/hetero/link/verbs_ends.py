"""Both ends of a link over RDMA in one process, over NICs that are copies within it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hetero.link.handshake import Rendezvous
from hetero.link.nics import Nics
from hetero.link.ring import RingOptions
from hetero.link.ring_link import RingLink
from hetero.link.verbs import open_verbs
from tests.hetero.link.joined import CPU, JoinedEnds

RING_BYTES = 64 << 10
CHUNK_BYTES = 16 << 10


@dataclass(frozen=True)
class Setup(JoinedEnds):
    names: tuple[tuple[str, ...], ...] = (("a0", "a1"), ("b0", "b1"))
    """Each end's NICs."""
    ring_bytes: int = RING_BYTES
    chunk_bytes: int = CHUNK_BYTES
    read_back: bool = False
    transport: str = "verbs"
    tensors_on: tuple[torch.device, ...] = (CPU, CPU)

    def open(self, rendezvous: Rendezvous) -> RingLink:
        rank = rendezvous.description.rank
        return open_verbs(
            rendezvous,
            RingOptions(self.transport, self.ring_bytes, self.chunk_bytes, self.devices[rank]),
            device=self.tensors_on[rank],
            nics=Nics(rdma=self.names[rank]),
            read_back=self.read_back,
        )
