"""What the two ends of a ring link agree on before they open it."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from hetero.device.device import Device
from hetero.link.handshake import Rendezvous, compare
from hetero.version import PROTOCOL_VERSION


@dataclass(frozen=True)
class RingOptions:
    """The transport and sizes of a ring link, the same at both ends, and this end's device."""

    transport: str
    ring_bytes: int
    """Of one direction."""
    chunk_bytes: int
    """The largest chunk of a message."""
    device: Device
    """Copies between this end's tensors and the rings."""

    @property
    def entry_bytes(self) -> int:
        """The largest entry: a ring holds two."""
        return min(self.chunk_bytes, self.ring_bytes // 2)

    @property
    def zero_copy(self) -> bool:
        """Whether larger messages skip the rings: the carrier can access the callers' tensors."""
        device = self.device
        return self.transport == "tcp" and device.has_host_tensors and device.checksum_bytes == 0

    def agree(self, connection: socket.socket, rendezvous: Rendezvous) -> None:
        """Raise LinkError, at both ends, unless they have the same protocol and options."""
        agreed = {
            "protocol": PROTOCOL_VERSION,
            "transport": self.transport,
            "ring_bytes": self.ring_bytes,
            "chunk_bytes": self.chunk_bytes,
            "checksum_bytes": self.device.checksum_bytes,
        }
        compare(connection, rendezvous, agreed)
