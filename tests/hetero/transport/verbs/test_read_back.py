"""What a NIC has written is used once the NIC has read it back, and not before. Emulated NICs.

The NICs hold what they write until they read, and for ever if they do not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from hetero.errors import LinkError
from hetero.transport.chunked import Chunk
from hetero.transport.header import HEADER_BYTES
from hetero.transport.verbs import rail as rail_module
from hetero.transport.verbs.ends import VerbsEnds
from tests.emulated_nic.objects import ENUMS, EmulatedError
from tests.emulated_nic.pair import QP
from tests.emulated_nic.world import Device, Fault, World, wait_until
from tests.hetero.transport.verbs.joined import SLOT_BYTES, STALL, Setup, exchange, noise

MESSAGE = 20 * SLOT_BYTES + 7
"""More than twice the ring, and no whole number of slots."""
ONE_RAIL = (("a0",), ("b0",))


def holding(world: World) -> Setup:
    """NICs that hold what they write, and a link that asks for it to be read back."""
    for device in world.devices.values():
        device.holds_writes = True
    setup = Setup(world)
    return replace(setup, options=replace(setup.options, read_back=True))


def soon() -> float:
    return time.monotonic() + 10


def send(ends: VerbsEnds, number: int, nbytes: int = SLOT_BYTES) -> None:
    slot = ends.send.acquire(soon())
    assert slot is not None
    slot[:nbytes].copy_(noise(nbytes, number))
    ends.send.publish(Chunk(header=bytes(HEADER_BYTES), offset=number, nbytes=nbytes))


def received(ends: VerbsEnds, number: int, nbytes: int = SLOT_BYTES) -> bool:
    """Whether the next chunk is this one, with its bytes."""
    taken = ends.recv.take(soon())
    assert taken is not None
    chunk, content = taken
    same = chunk.offset == number and content.equal(noise(nbytes, number))
    ends.recv.release()
    return same


class Gate:
    """Lets the reads of a device wait until it is opened."""

    def __init__(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        self.passed = threading.Event()
        look_up = QP._look_up

        def gated(pair: QP, rkey: int, target: int, nbytes: int) -> Any:
            if pair._device.name != device:
                return look_up(pair, rkey, target, nbytes)
            self.reached.set()
            assert self._open.wait(10)
            answer = look_up(pair, rkey, target, nbytes)
            self.passed.set()
            return answer

        monkeypatch.setattr(QP, "_look_up", gated)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(world: World, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Before the reads of b0. Requests are tried for longer than it is closed."""
    world.ack_seconds = 10.0
    return Gate("b0", monkeypatch)


def patient(setup: Setup) -> Setup:
    return replace(setup, options=replace(setup.options, stall_seconds=10.0))


def test_bytes_that_a_nic_holds_arrive_whole(world: World) -> None:
    with holding(world).links() as links:
        exchange(links, messages=6, nbytes=MESSAGE)


def test_without_a_read_back_they_would_be_wrong(world: World) -> None:
    """Else the other tests here would show nothing."""
    setup = holding(world)
    setup = replace(setup, options=replace(setup.options, read_back=False))
    with setup.ends() as (here, there):
        send(here, 1)
        assert not received(there, 1)


def test_a_chunk_is_not_handed_on_before_the_read_is_answered(world: World, gate: Gate) -> None:
    with patient(replace(holding(world), nics=ONE_RAIL)).ends() as (here, there):
        send(here, 1)
        assert gate.reached.wait(10)
        assert there.recv.take(None) is None
        with pytest.raises(TimeoutError, match="rank 0 did not move"):
            there.recv.take(time.monotonic() + 0.1)
        gate.open()
        assert received(there, 1)
    assert world.devices["b0"].reads == 1


def test_one_read_serves_all_chunks_that_came_while_another_was_under_way(
    world: World, gate: Gate
) -> None:
    with patient(replace(holding(world), nics=ONE_RAIL)).ends() as (here, there):
        send(here, 0)
        assert gate.reached.wait(10)
        for number in range(1, 8):
            send(here, number)
        # It waits until all of them have arrived.
        here.send.close()
        gate.open()
        assert all(received(there, number) for number in range(8))
    assert world.devices["b0"].reads == 2


def test_every_rail_reads_back_what_it_has_brought_itself(world: World) -> None:
    with holding(world).links() as links:
        exchange(links, messages=8, nbytes=MESSAGE)
    for device in world.devices.values():
        assert 0 < device.reads < device.received, device.name


def test_an_empty_chunk_needs_no_read(world: World) -> None:
    with holding(world).ends() as (here, there):
        send(here, 5, nbytes=0)
        assert received(there, 5, nbytes=0)
    assert sum(device.reads for device in world.devices.values()) == 0


@dataclass(frozen=True)
class ReadFault:
    """What may go wrong with reads alone, and how the rail's loss is then explained."""

    kind: Fault
    reason: str
    stall: float
    """The link's own deadline: longer than the NIC's retries where these are to be met."""

    def strike(self, device: Device) -> None:
        device.read_fault = self.kind

    def met_by(self, setup: Setup) -> Setup:
        return replace(setup, options=replace(setup.options, stall_seconds=self.stall))


FAILING = ReadFault(Fault.CUT, "it cannot read its own slots back: completion status 12", 10.0)
ENDLESS = ReadFault(Fault.SILENT, "it has not read its own slots back for 0.6 s", STALL)
READ_FAULTS = pytest.mark.parametrize("fault", [FAILING, ENDLESS], ids=["failing", "endless"])


@pytest.mark.parametrize("packets", [1, 9])
@READ_FAULTS
def test_a_rail_that_cannot_read_back_is_lost_and_loses_no_byte(
    world: World, caplog: pytest.LogCaptureFixture, fault: ReadFault, packets: int
) -> None:
    """Its chunks have arrived and are acknowledged, and are sent again all the same."""
    world.devices["b1"].after(packets, fault.strike)
    with caplog.at_level(logging.WARNING), fault.met_by(holding(world)).links() as links:
        exchange(links, messages=4, nbytes=MESSAGE)
        lost = [r.message for r in caplog.records if "is lost" in r.message]
        assert len(lost) == 2, "each side says it once"
        assert all("rail 1" in line and fault.reason in line for line in lost)
        assert any("of rail 1 are sent again" in r.message for r in caplog.records)
        exchange(links, messages=4, nbytes=MESSAGE, seed=100)


def test_a_rail_whose_nic_takes_no_read_is_lost_too(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = QP.post_send

    def refused(pair: QP, first: Any) -> None:
        if first.opcode == ENUMS.IBV_WR_RDMA_READ and pair._device.name == "b1":
            raise EmulatedError("Failed to post send", 12)
        post(pair, first)

    monkeypatch.setattr(QP, "post_send", refused)
    with caplog.at_level(logging.WARNING), holding(world).links() as links:
        exchange(links, messages=4, nbytes=MESSAGE)
    lost = [r.message for r in caplog.records if "is lost" in r.message]
    assert len(lost) == 2
    assert all("rail 1" in line and "Failed to post send" in line for line in lost)


@READ_FAULTS
def test_the_last_rail_that_cannot_read_back_is_an_error_on_both_sides(
    world: World, fault: ReadFault
) -> None:
    world.devices["b0"].after(9, fault.strike)
    reason = fault.reason
    with fault.met_by(replace(holding(world), nics=ONE_RAIL)).links() as links:
        receiving = links[1].recv(noise(MESSAGE, 1))
        sending = links[0].send(noise(MESSAGE, 2))
        with pytest.raises(LinkError, match=rf"rank 1 .* rank 0 .* last rail, b0:1,.*{reason}"):
            receiving.wait()
        with pytest.raises(LinkError, match=rf"rank 0 .* rank 1 .* last rail, a0:1,.*{reason}"):
            sending.wait()


def test_what_a_lost_rail_still_holds_falls_into_no_slot_that_is_used_again(
    world: World, gate: Gate
) -> None:
    """Its read was under way when it was lost, and would now show what came over it long ago."""
    with patient(holding(world)).ends() as (here, there):
        for number in range(8):
            send(here, number)
        assert gate.reached.wait(10)
        world.devices["a0"].take_port_down(ENUMS.IBV_EVENT_PORT_ERR)
        assert all(received(there, number) for number in range(8))
        for number in range(8, 16):
            send(here, number)
        taken = [there.recv.take(soon()) for _ in range(8)]
        gate.open()
        assert gate.passed.wait(10)
        for number, chunk in enumerate(taken, start=8):
            assert chunk is not None
            assert chunk[1].equal(noise(SLOT_BYTES, number))


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("side", ["a1", "b1"])
def test_a_rail_lost_in_the_middle_of_messages_loses_no_byte(
    world: World, fault: Fault, side: str
) -> None:
    world.devices[side].after(9, lambda device: device.break_with(fault))
    with holding(world).links() as links:
        exchange(links, messages=4, nbytes=MESSAGE)


@pytest.mark.parametrize("packets", range(1, 24, 3))
def test_it_does_not_matter_when_a_rail_is_lost(world: World, packets: int) -> None:
    world.devices["b0"].after(packets, lambda device: device.break_with(Fault.DEAF))
    with holding(world).links() as links:
        exchange(links, messages=2, nbytes=MESSAGE)


def test_what_was_sent_before_closing_still_arrives(world: World, gate: Gate) -> None:
    """The peer has gone by the time the reads are answered; they need nobody else."""
    with patient(replace(holding(world), nics=ONE_RAIL)).ends() as (here, there):
        for number in range(3):
            send(here, number)
        here.send.close()
        here.close()
        wait_until(lambda: _has_failed(there.send.acquire))
        assert there.recv.take(None) is None, "not an error as long as something may yet come"
        gate.open()
        assert all(received(there, number) for number in range(3))
        with pytest.raises(ConnectionError, match="rank 0 has ended or closed the link"):
            there.recv.take(soon())


def _has_failed(acquire: Callable[[float | None], Any]) -> bool:
    try:
        acquire(None)
    except ConnectionError:
        return True
    return False


def test_one_end_may_read_back_without_the_other(world: World) -> None:
    setup = holding(world)
    for name in ("a0", "a1"):
        world.devices[name].holds_writes = False
    world.devices["b1"].after(9, FAILING.strike)
    with _OneSided(**vars(setup)).links() as links:
        exchange(links, messages=4, nbytes=MESSAGE)
    assert world.devices["a0"].reads == world.devices["a1"].reads == 0


class _OneSided(Setup):
    """Only rank 1 reads back."""

    def _open(self, rank: int, store: Any) -> VerbsEnds:
        options = replace(self.options, read_back=rank == 1)
        return Setup._open(Setup(**{**vars(self), "options": options}), rank, store)


def test_slots_that_may_not_be_read_cost_the_rail_and_the_nic_says_why(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    register = rail_module.register

    def unreadable(*arguments: Any, nic: str, is_read: bool) -> Any:
        return register(*arguments, nic=nic, is_read=is_read and not nic.startswith("b"))

    monkeypatch.setattr(rail_module, "register", unreadable)
    status = int(ENUMS.IBV_WC_REM_ACCESS_ERR)
    with holding(world).links() as links:
        links[0].send(noise(MESSAGE, 1))
        with pytest.raises(LinkError, match=f"last rail.*completion status {status}"):
            links[1].recv(noise(MESSAGE, 2)).wait()
    assert "the peer may not read: no region has 1 bytes at 0x" in capfd.readouterr().err
