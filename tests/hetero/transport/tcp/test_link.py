"""What a TCP link does whether its tensors go in place or through rings, and between the two."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import closing

import pytest
import torch

from hetero.errors import LinkError
from hetero.transport.header import Header, job_token
from hetero.transport.tcp.wire import Frame
from tests.hetero.transport.tcp.ends import CHUNK, WAYS, end, linked, pairs, read_chunk


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def noise(count: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def reset(connection: socket.socket) -> None:
    """End a connection as a host does that has lost it: at once, with what is in it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("ways", [(a, b) for a in WAYS for b in WAYS], ids=" to ".join)
def test_either_kind_of_end_may_be_at_the_other(ways: tuple[str, str]) -> None:
    sizes = (0, 1, CHUNK, CHUNK + 1, 11 * CHUNK + 5)
    with linked(*ways) as ends:
        sent = [[noise(n, seed=rank) for n in sizes] for rank in range(2)]
        targets = [[torch.zeros_like(tensor) for tensor in sent[1 - rank]] for rank in range(2)]
        works = [
            end.send(tensor) for end, tensors in zip(ends, sent, strict=True) for tensor in tensors
        ]
        works += [
            end.recv(target)
            for end, expected in zip(ends, targets, strict=True)
            for target in expected
        ]
        for work in works:
            work.wait()
    for rank in range(2):
        assert all(map(torch.equal, targets[rank], sent[1 - rank]))


def test_a_slow_connection_carries_fewer_chunks(way: str) -> None:
    """The slowness is emulated: that connection's reader sleeps between chunks."""
    out, far = pairs(3)
    incoming, _far_out = pairs(1)
    carried = [0, 0, 0]

    def read(index: int) -> None:
        while read_chunk(far[index]) is not None:
            carried[index] += 1
            time.sleep(0.05 if index == 1 else 0.001)

    readers = [threading.Thread(target=read, args=(index,)) for index in range(3)]
    for reader in readers:
        reader.start()
    with closing(end(way, 0, out, incoming)) as link:
        link.send(noise(120 * CHUNK)).wait()
    for reader in readers:
        reader.join(20)
    assert sum(carried) == 120
    assert carried[1] < min(carried[0], carried[2])


def test_what_was_sent_before_the_peer_closed_still_arrives(way: str) -> None:
    """The connections come to their end one by one, and some while others hold messages."""
    sent = [noise(n, seed=n) for n in (5, CHUNK + 1, 9, 17)]
    with linked(way) as (first, second):
        for tensor in sent:
            first.send(tensor)
        first.close()
        for tensor in sent:
            target = torch.zeros_like(tensor)
            second.recv(target).wait()
            assert torch.equal(target, tensor)
        with pytest.raises(LinkError, match="rank 0 has ended or closed the link"):
            second.recv(torch.zeros(1)).wait()


def test_the_end_of_one_connection_is_no_loss_while_another_brings_the_message(way: str) -> None:
    sent, target = noise(8), torch.zeros(8, dtype=torch.uint8)
    header = Header.of(sent, job=job_token("job"), sequence=0).pack()
    out, _far = pairs(1)
    far_out, incoming = pairs(2)
    with closing(end(way, 0, out, incoming)) as link:
        work = link.recv(target)
        far_out[0].close()
        time.sleep(0.3)
        far_out[1].sendall(Frame(0, header, 0, 8, 0).pack() + bytes(sent.tolist()))
        work.wait()
    assert torch.equal(target, sent)


def test_a_connection_that_breaks_is_an_error_at_once(way: str) -> None:
    out, _far = pairs(1)
    far_out, incoming = pairs(3)
    with closing(end(way, 0, out, incoming)) as link:
        work = link.recv(torch.zeros(4 * CHUNK, dtype=torch.uint8))
        begin = time.monotonic()
        reset(far_out[1])
        with pytest.raises(LinkError, match="rank 1 has ended or closed the link"):
            work.wait()
    assert time.monotonic() - begin < 5


def test_a_sender_that_nobody_waits_for_is_told_that_nothing_moves(way: str) -> None:
    with linked(way, timeout=0.5) as (first, _):
        first.send(noise(64 * CHUNK))
        deadline = time.monotonic() + 10
        with pytest.raises(LinkError, match=r"rank 0 \(stage 0\)"):  # noqa: PT012
            while time.monotonic() < deadline:
                time.sleep(0.05)
                first.send(noise(1))
