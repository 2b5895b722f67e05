"""Both ends of a TCP link in one process, over real connections, for the tests here."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import torch

from hetero.device.cpu import CpuRuntime
from hetero.transport.base import Link, LinkDescription
from hetero.transport.chunked import ChunkedLink, RingShape
from hetero.transport.tcp.in_place import InPlaceLink
from hetero.transport.tcp.ring import LocalRing, TcpRecvEnd, TcpSendEnd
from hetero.transport.tcp.wire import Frame, receive_frame, receive_into

CHUNK = 64 << 10
WAYS = ("in place", "through rings")

Connections = Sequence[socket.socket]


def pairs(count: int) -> tuple[list[socket.socket], list[socket.socket]]:
    """Joined connections with small buffers, so that what a test sends does not all fit there."""
    here, there = [], []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK)
        for _ in range(count):
            connection = socket.create_connection(listener.getsockname())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK)
            here.append(connection)
            there.append(listener.accept()[0])
    return here, there


def describe(rank: int, *, timeout: float = 20.0) -> LinkDescription:
    return LinkDescription(
        rank=rank, peer=1 - rank, stage=rank, peer_stage=1 - rank, job="job", timeout=timeout
    )


def end(
    way: str,
    rank: int,
    outgoing: Connections,
    incoming: Connections,
    *,
    timeout: float = 20.0,
    checksum: bool = False,
) -> Link:
    description = describe(rank, timeout=timeout)
    if way == "in place":
        return InPlaceLink(
            description,
            outgoing=outgoing,
            incoming=incoming,
            chunk_bytes=CHUNK,
            checksum=checksum,
        )
    shape, runtime = RingShape(slots=4, slot_bytes=CHUNK), CpuRuntime()
    return ChunkedLink(
        description,
        transport="tcp",
        send_end=TcpSendEnd(outgoing, LocalRing(shape, runtime), 1 - rank, str(rank)),
        recv_end=TcpRecvEnd(incoming, LocalRing(shape, runtime), 1 - rank, str(rank)),
        device=torch.device("cpu"),
        checksum=checksum,
    )


@contextmanager
def linked(*ways: str, connections: int = 3, timeout: float = 20.0) -> Iterator[list[Link]]:
    """Both ends of one link, rank 0 first."""
    out0, in1 = pairs(connections)
    out1, in0 = pairs(connections)
    with (
        closing(end(ways[0], 0, out0, in0, timeout=timeout)) as first,
        closing(end(ways[-1], 1, out1, in1, timeout=timeout)) as second,
    ):
        yield [first, second]


def read_chunk(connection: socket.socket) -> Frame | None:
    """Read one chunk as a peer does, and drop its bytes."""
    frame = receive_frame(connection)
    if frame is not None:
        receive_into(connection, memoryview(bytearray(frame.nbytes)))
    return frame
