"""What goes between two emulated queue pairs: requests, packets and answers."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tests.emulated_nic.objects import ENUMS

# opcode, whether there is an immediate, it, remote key, remote address, bytes that follow (of a
# read: bytes that are asked for)
PACKET = struct.Struct("<BBIIQI")
# How the request completes. The bytes of a read that succeeded follow.
ANSWER = struct.Struct("<B")


@dataclass(frozen=True)
class Request:
    """A posted request as the driver has copied it."""

    number: int
    opcode: int
    imm: int
    rkey: int
    target: int
    source: int
    nbytes: int
    lkey: int
    inline: bytes | None
    signaled: bool

    def __str__(self) -> str:
        here, there = ("to", "from") if self.is_read else ("from", "to")
        return (
            f"request {self.number} (opcode {self.opcode}, {self.nbytes} bytes {here} "
            f"{self.source:#x} under key {self.lkey} {there} {self.target:#x} under key "
            f"{self.rkey})"
        )

    @property
    def is_read(self) -> bool:
        return self.opcode == ENUMS.IBV_WR_RDMA_READ

    def packet(self) -> bytes:
        """The header; the bytes of anything but a read follow it."""
        has_imm = self.opcode in (ENUMS.IBV_WR_RDMA_WRITE_WITH_IMM, ENUMS.IBV_WR_SEND_WITH_IMM)
        return PACKET.pack(self.opcode, has_imm, self.imm, self.rkey, self.target, self.nbytes)
