"""Slots and credits: a full ring stops the sender, and nothing is posted that finds no place."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from hetero.transport.chunked import Chunk, RingShape
from hetero.transport.header import HEADER_BYTES
from tests.emulated_nic.world import World, wait_until
from tests.hetero.transport.verbs.joined import SLOT_BYTES, Setup, exchange, noise


def chunk(number: int, nbytes: int = SLOT_BYTES) -> Chunk:
    return Chunk(header=bytes([number]) * HEADER_BYTES, offset=number, nbytes=nbytes, checksum=3)


def soon() -> float:
    return time.monotonic() + 10


def test_the_sender_fills_the_ring_and_then_waits_for_a_slot(world: World) -> None:
    with Setup(world).ends() as (here, there):
        for number in range(8):
            slot = here.send.acquire(None)
            assert slot is not None
            slot.copy_(noise(SLOT_BYTES, number))
            here.send.publish(chunk(number))
        assert here.send.acquire(None) is None
        with pytest.raises(TimeoutError, match="rank 1 did not move"):
            here.send.acquire(time.monotonic() + 0.1)
        for number in range(2):
            taken = there.recv.take(soon())
            assert taken is not None
            assert taken[0] == chunk(number)
            assert torch.equal(taken[1], noise(SLOT_BYTES, number))
            there.recv.release()
        # Slots are given back by the quarter ring.
        for _ in range(2):
            assert here.send.acquire(soon()) is not None
        assert here.send.acquire(None) is None


def test_a_receiver_waits_no_longer_than_it_is_told(world: World) -> None:
    with Setup(world).ends() as (here, _):
        assert here.recv.take(None) is None
        with pytest.raises(TimeoutError, match="rank 1 did not move"):
            here.recv.take(time.monotonic() + 0.1)


def test_a_chunk_may_be_empty(world: World) -> None:
    with Setup(world).ends() as (here, there):
        assert here.send.acquire(None) is not None
        here.send.publish(chunk(5, nbytes=0))
        taken = there.recv.take(soon())
        assert taken is not None
        assert taken[0] == chunk(5, nbytes=0)
        assert taken[1].numel() == 0


@pytest.mark.parametrize("slots", [2, 3, 16])
def test_a_ring_may_have_any_number_of_slots(world: World, slots: int) -> None:
    setup = replace(Setup(world), shape=RingShape(slots=slots, slot_bytes=SLOT_BYTES))
    with setup.links() as links:
        exchange(links, messages=6, nbytes=5 * SLOT_BYTES + 1)


def test_receives_never_run_out(world: World) -> None:
    """The emulated NIC fails a request at once that finds no posted receive."""
    with Setup(world).links() as links:
        exchange(links, messages=100, nbytes=10)
        exchange(links, messages=10, nbytes=40 * SLOT_BYTES)


def test_a_nic_that_takes_nothing_inline_works_too(world: World) -> None:
    for device in world.devices.values():
        device.max_inline = 0
    with Setup(world).links() as links:
        exchange(links, messages=6, nbytes=20 * SLOT_BYTES + 1)


def test_a_refusal_reaches_the_sender_in_its_own_words(world: World) -> None:
    with Setup(world).ends() as (here, there):
        there.recv.refuse("rank 1 refused a message: its dtype")
        wait_until(lambda: _error(here.send.acquire) == "rank 1 refused a message: its dtype")


def _error(acquire: object) -> str:
    try:
        acquire(None)  # type: ignore[operator]
    except ConnectionError as error:
        return str(error)
    return ""
