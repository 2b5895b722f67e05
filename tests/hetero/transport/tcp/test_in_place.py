"""Tensors in host memory go to the wire and come from it without a buffer between."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest
import torch

from hetero.errors import LinkError
from hetero.transport.header import Header, job_token
from hetero.transport.tcp.in_place import InPlaceLink
from hetero.transport.tcp.wire import Frame
from tests.hetero.transport.tcp.ends import CHUNK, Connections, end, linked, pairs

NBYTES = 2 * CHUNK + 5


def test_a_message_nobody_asked_for_waits_at_its_sender_and_holds_up_nothing_else() -> None:
    large = torch.arange(16 * CHUNK // 8)
    target = torch.zeros_like(large)
    with linked("in place") as (first, second):
        unasked = first.send(large)
        # The other direction is independent of it.
        second.send(large)
        first.recv(target).wait()
        assert torch.equal(target, large)
        assert not unasked.done()
        target.zero_()
        second.recv(target).wait()
        unasked.wait()
    assert torch.equal(target, large)


def test_nothing_of_a_refused_message_lands() -> None:
    target = torch.zeros(16 * CHUNK // 4, dtype=torch.float32)
    with linked("in place") as (first, second):
        sent = first.send(torch.ones(16 * CHUNK // 4, dtype=torch.int32))
        with pytest.raises(LinkError, match=r"torch.int32 instead of torch.float32"):
            second.recv(target).wait()
        with pytest.raises(LinkError, match="rank 1 refused a message: dtype"):
            sent.wait()
    assert not target.any()


def test_a_receive_that_is_only_polled_ends_in_time_too() -> None:
    with linked("in place", timeout=0.3) as (first, _):
        work = first.recv(torch.zeros(1))
        assert not work.done()
        time.sleep(0.5)
        assert work.done()
        with pytest.raises(LinkError, match=r"nothing moved for 0\.3 s"):
            work.wait()


def test_a_message_late_in_a_queue_is_not_overdue_while_earlier_ones_move() -> None:
    targets = [torch.zeros(1) for _ in range(6)]
    with linked("in place", timeout=0.6) as (first, second):
        works = [first.recv(target) for target in targets]
        for value in range(6):
            time.sleep(0.2)
            second.send(torch.full((1,), float(value)))
        works[-1].wait()
    assert [float(target) for target in targets] == [0, 1, 2, 3, 4, 5]


def test_a_tensor_that_is_not_in_host_memory_is_refused() -> None:
    with (
        linked("in place") as (first, _),
        pytest.raises(ValueError, match="tensors in host memory, not on meta"),
    ):
        first.send(torch.zeros(4, device="meta"))


# What a peer that keeps to the protocol never sends.


@dataclass
class HandMade:
    """A link that expects NBYTES bytes, and the far ends of its incoming connections."""

    link: InPlaceLink
    wires: Connections
    target: torch.Tensor

    def send(self, *, offset: int, number: int | None = None, nbytes: int | None = None) -> None:
        header = Header.of(self.target, job=job_token("job"), sequence=0)
        payload = b"\7" * (min(CHUNK, NBYTES - offset) if nbytes is None else nbytes)
        frame = Frame(
            number=offset // CHUNK if number is None else number,
            header=header.pack(),
            offset=offset,
            nbytes=len(payload),
            checksum=zlib.crc32(payload),
        )
        self.wires[0].sendall(frame.pack() + payload)

    def fails_with(self, text: str) -> None:
        with pytest.raises(LinkError, match=text):
            self.link.recv(self.target).wait()


@pytest.fixture
def by_hand() -> Iterator[HandMade]:
    outgoing, _far = pairs(1)
    wires, incoming = pairs(2)
    with closing(end("in place", 0, outgoing, incoming, checksum=True)) as link:
        assert isinstance(link, InPlaceLink)
        yield HandMade(link, wires, torch.zeros(NBYTES, dtype=torch.uint8))


def test_chunks_may_come_in_any_order(by_hand: HandMade) -> None:
    for offset in (2 * CHUNK, 0, CHUNK):
        by_hand.send(offset=offset)
    by_hand.link.recv(by_hand.target).wait()
    assert bool((by_hand.target == 7).all())


def test_a_chunk_that_comes_twice_is_refused(by_hand: HandMade) -> None:
    by_hand.send(offset=CHUNK)
    by_hand.send(offset=CHUNK)
    by_hand.fails_with(f"a chunk at byte {CHUNK} that is not due")


@pytest.mark.parametrize("offset", [1, 4 * CHUNK, 1 << 40])
def test_a_chunk_outside_its_place_is_refused(by_hand: HandMade, offset: int) -> None:
    by_hand.send(offset=offset, nbytes=8)
    by_hand.fails_with(f"a chunk at byte {offset} that is not due")


@pytest.mark.parametrize("nbytes", [0, 4, 6])
def test_a_chunk_of_another_size_is_refused(by_hand: HandMade, nbytes: int) -> None:
    by_hand.send(offset=2 * CHUNK, nbytes=nbytes)
    by_hand.fails_with(f"a chunk of {nbytes} bytes at byte {2 * CHUNK}")
    assert not by_hand.target.any()


def test_a_chunk_of_another_number_is_refused(by_hand: HandMade) -> None:
    by_hand.send(offset=0, number=5)
    by_hand.fails_with("chunk 5 instead of 0")


def test_bytes_that_changed_on_the_way_are_refused(by_hand: HandMade) -> None:
    header = Header.of(by_hand.target, job=job_token("job"), sequence=0).pack()
    frame = Frame(number=2, header=header, offset=2 * CHUNK, nbytes=5, checksum=1)
    by_hand.wires[0].sendall(frame.pack() + b"12345")
    by_hand.fails_with(f"a wrong checksum in its bytes from {2 * CHUNK} on")


def test_a_header_that_is_none_is_refused(by_hand: HandMade) -> None:
    frame = Frame(number=0, header=b"", offset=0, nbytes=0, checksum=0)
    by_hand.wires[1].sendall(frame.pack())
    by_hand.fails_with("the header is corrupted")


def test_a_message_that_can_no_longer_come_whole_is_an_error_at_once(by_hand: HandMade) -> None:
    """One connection has ended, and the other already holds the message after."""
    header = Header.of(by_hand.target, job=job_token("job"), sequence=1).pack()
    by_hand.wires[1].sendall(Frame(3, header, 0, CHUNK, 0).pack())
    by_hand.wires[0].close()
    begin = time.monotonic()
    by_hand.fails_with("rank 1 has ended or closed the link")
    assert time.monotonic() - begin < 5
