"""The `cpu-forward` transport: through host memory, over whichever path joins the two ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hetero.device.choose import runtime_for
from hetero.transport.chunked import ChunkedLink, RingShape
from hetero.transport.handshake import Meeting
from hetero.transport.shm import can_share_memory, open_shm
from hetero.transport.tcp import TcpPaths, open_tcp

PATHS = ("shm", "tcp")


@dataclass(frozen=True)
class ChannelOptions:
    """What a user may set of a channel; the same on both sides."""

    ring_bytes: int = 64 << 20
    """Memory of one link, both directions together. The ring is its only buffer."""
    chunk_bytes: int = 2 << 20
    checksum: bool = False
    connections: int = 4
    """TCP connections of each direction."""
    addresses: tuple[str, ...] = ("127.0.0.1",)
    """This side's addresses for TCP, one a network interface."""

    @property
    def shape(self) -> RingShape:
        slots = self.ring_bytes // 2 // self.chunk_bytes
        return RingShape(slots=max(2, slots), slot_bytes=self.chunk_bytes)


def open_forward(
    meeting: Meeting, *, options: ChannelOptions, device: torch.device, path: str | None = None
) -> ChunkedLink:
    """Open a link through host memory: shared where both ends run on one host, TCP otherwise.

    Collective between the two ends; `path` forces one of PATHS.
    """
    chosen = path or choose_path(meeting)
    runtime = runtime_for(device)
    if chosen == "shm":
        ends = open_shm(meeting, shape=options.shape, runtime=runtime)
        return ChunkedLink(
            meeting.description,
            transport="shm",
            send_end=ends.send,
            recv_end=ends.recv,
            device=device,
            checksum=options.checksum,
            on_close=ends.close,
        )
    send, recv = open_tcp(
        meeting,
        shape=options.shape,
        paths=TcpPaths(addresses=options.addresses, connections=options.connections),
        runtime=runtime,
    )
    return ChunkedLink(
        meeting.description,
        transport="tcp",
        send_end=send,
        recv_end=recv,
        device=device,
        checksum=options.checksum,
    )


def choose_path(meeting: Meeting) -> str:
    """The faster path that both ends have. Both come to the same answer."""
    return "shm" if can_share_memory(meeting) else "tcp"
