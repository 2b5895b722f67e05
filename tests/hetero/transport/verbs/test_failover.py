"""A lost rail costs time and no byte; the last one is an error on both sides. Emulated NICs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from hetero.errors import LinkError
from hetero.transport.chunked import Chunk
from hetero.transport.header import HEADER_BYTES
from hetero.transport.verbs.ends import VerbsEnds
from tests.emulated_nic.objects import ENUMS
from tests.emulated_nic.world import Device, Fault, World, wait_until
from tests.hetero.transport.verbs.joined import SLOT_BYTES, Setup, exchange, noise

MESSAGE = 20 * SLOT_BYTES + 7
"""More than twice the ring, and no whole number of slots."""


def port_down(device: Device) -> None:
    device.take_port_down(ENUMS.IBV_EVENT_PORT_ERR)


FAULTS: dict[str, Callable[[Device], None]] = {
    "nothing goes out or comes in": lambda device: device.break_with(Fault.CUT),
    "its requests never complete": lambda device: device.break_with(Fault.SILENT),
    "it acknowledges nothing": lambda device: device.break_with(Fault.DEAF),
    "its port goes down": port_down,
}


@pytest.mark.parametrize("side", ["a1", "b1"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rail_lost_in_the_middle_of_messages_loses_no_byte(
    world: World, caplog: pytest.LogCaptureFixture, fault: str, side: str
) -> None:
    world.devices[side].after(9, FAULTS[fault])
    with caplog.at_level(logging.WARNING), Setup(world).links() as links:
        exchange(links, messages=4, nbytes=MESSAGE)
        lost = [r.message for r in caplog.records if "is lost" in r.message]
        assert len(lost) == 2, "each side says it once"
        assert all("rail 1" in line and "1 of 2 rails go on" in line for line in lost)
        exchange(links, messages=4, nbytes=MESSAGE, seed=100)


@pytest.mark.parametrize("packets", range(1, 24))
def test_it_does_not_matter_when_a_rail_is_lost(world: World, packets: int) -> None:
    """A payload, its record and a credit are different packets; any may be the last one."""
    world.ack_seconds = 0.05
    world.devices["b0"].after(packets, lambda device: device.break_with(Fault.DEAF))
    with Setup(world).links() as links:
        exchange(links, messages=2, nbytes=MESSAGE)


def test_a_slower_rail_that_is_lost_late_brings_nothing_twice(world: World) -> None:
    """What a rail has brought without saying so is sent again, and is seen to be a duplicate."""
    world.devices["b1"].delay = 0.01
    world.devices["b1"].after(6, lambda device: device.break_with(Fault.DEAF))
    with Setup(world).links() as links:
        exchange(links, messages=6, nbytes=MESSAGE)


def test_a_packet_that_comes_too_late_falls_into_no_slot_that_is_used_again(world: World) -> None:
    """Its rail has been given up, its chunk has gone over the other, and the ring has gone on."""
    world.ack_seconds = 0.05
    held_up = 0.5
    world.devices["b0"].delay = held_up
    with Setup(world).ends() as (here, there):
        began = time.monotonic()
        for number in range(8):
            send(here, number)
        for number in range(8):
            assert received(there, number)
        for number in range(8, 16):
            send(here, number)
        assert time.monotonic() < began + held_up, "the packet must come later than this"
        time.sleep(began + 2 * held_up - time.monotonic())
        assert world.devices["b0"].received > 0
        assert all(received(there, number) for number in range(8, 16))


def send(ends: VerbsEnds, number: int) -> None:
    slot = ends.send.acquire(time.monotonic() + 10)
    assert slot is not None
    slot.copy_(noise(SLOT_BYTES, number))
    ends.send.publish(Chunk(header=bytes(HEADER_BYTES), offset=number, nbytes=SLOT_BYTES))


def received(ends: VerbsEnds, number: int) -> bool:
    """Whether the next chunk is this one, with its bytes."""
    taken = ends.recv.take(time.monotonic() + 10)
    assert taken is not None
    chunk, content = taken
    same = chunk.offset == number and content.equal(noise(SLOT_BYTES, number))
    ends.recv.release()
    return same


def test_rails_that_overtake_each_other_do_not_change_the_order(world: World) -> None:
    world.devices["b0"].delay = 0.004
    with Setup(world).links() as links:
        exchange(links, messages=6, nbytes=MESSAGE)


def test_a_faster_rail_carries_more(world: World) -> None:
    world.devices["b1"].delay = 0.01
    with Setup(world).links() as links:
        exchange(links, messages=8, nbytes=MESSAGE)
    assert world.devices["b0"].received > 2 * world.devices["b1"].received


@pytest.mark.parametrize("fault", FAULTS)
def test_the_last_rail_lost_is_an_error_on_both_sides(world: World, fault: str) -> None:
    setup = replace(Setup(world), nics=(("a0",), ("b0",)))
    world.devices["b0"].after(9, FAULTS[fault])
    with setup.links() as links:
        receiving = links[1].recv(noise(MESSAGE, 1))
        sending = links[0].send(noise(MESSAGE, 2))
        with pytest.raises(LinkError, match=r"rank 1 .* rank 0 .* last rail.*b0:1"):
            receiving.wait()
        with pytest.raises(LinkError, match=r"rank 0 .* rank 1 .* last rail.*a0:1"):
            sending.wait()


def test_both_rails_lost_one_after_the_other_is_an_error(world: World) -> None:
    world.devices["b0"].after(9, lambda device: device.break_with(Fault.CUT))
    world.devices["a1"].after(3, lambda device: device.break_with(Fault.CUT))
    with Setup(world).links() as links, pytest.raises(LinkError, match="last rail"):
        exchange(links, messages=20, nbytes=MESSAGE)


def test_a_port_that_goes_down_on_an_idle_link_is_lost_at_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Setup(world).links() as links:
        world.devices["a0"].take_port_down(ENUMS.IBV_EVENT_PORT_ERR)
        wait_until(lambda: sum("is lost" in r.message for r in caplog.records) == 2)
        exchange(links, messages=4, nbytes=MESSAGE)


def test_a_port_that_was_down_for_a_moment_is_kept(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Setup(world).links() as links:
        device = world.devices["a0"]
        device.take_port_down(ENUMS.IBV_EVENT_PORT_ERR)
        device.fault, device.active = None, True
        exchange(links, messages=4, nbytes=MESSAGE)
    # The event may be seen before the port is up again, and then the rail is lost for good.
    assert len(caplog.records) in (0, 2, 3)


def test_a_peer_that_closes_is_not_taken_for_lost_rails(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Setup(world).links() as links:
        work = links[1].recv(noise(MESSAGE, 1))
        links[0].close()
        with pytest.raises(LinkError, match="rank 0 has ended or closed the link"):
            work.wait()
        time.sleep(2 * world.ack_seconds)
    assert not caplog.records


def test_what_was_sent_before_closing_still_arrives(world: World) -> None:
    sent, target = noise(3 * SLOT_BYTES, 1), noise(3 * SLOT_BYTES, 2)
    with Setup(world).links() as links:
        links[0].send(sent).wait()
        links[0].close()
        links[1].recv(target).wait()
    assert sent.equal(target)
