"""The emulated NIC's own promises: slow memory is no lost packet, and every failure says why."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from hetero.errors import LinkError
from hetero.transport.verbs.rail import Rail
from tests.emulated_nic import memory
from tests.emulated_nic.objects import ENUMS, PD
from tests.emulated_nic.world import Fault, World
from tests.hetero.transport.verbs.joined import SLOT_BYTES, TIMEOUT, Setup, exchange, noise

LATE = 0.8
"""Longer than a request is tried by default, retries and all."""
_WRITE = memory.write


class LateMemory:
    """Host memory that, like that of a GPU whose driver is busy, takes its time at first."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.ready = 0.0

    def write(self, address: int, data: bytes, *, who: str) -> None:
        if not self.reached.is_set():
            self.ready = time.monotonic() + LATE
            self.reached.set()
        time.sleep(max(0.0, self.ready - time.monotonic()))
        _WRITE(address, data, who=who)


@pytest.fixture
def late_memory(monkeypatch: pytest.MonkeyPatch) -> LateMemory:
    late = LateMemory()
    monkeypatch.setattr(memory, "write", late.write)
    return late


def patient(world: World) -> Setup:
    world.ack_seconds = TIMEOUT
    setup = Setup(world)
    return replace(setup, options=replace(setup.options, stall_seconds=TIMEOUT))


def test_memory_that_is_slow_at_first_costs_no_rail_where_requests_are_given_time(
    world: World, late_memory: LateMemory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), patient(world).links() as links:
        exchange(links, messages=4, nbytes=20 * SLOT_BYTES + 7)
    assert late_memory.reached.is_set()
    assert not caplog.records


def test_where_they_are_not_the_loss_is_told_as_retries_without_an_answer(
    world: World, late_memory: LateMemory, capfd: pytest.CaptureFixture[str]
) -> None:
    setup = Setup(world)
    setup = replace(setup, options=replace(setup.options, stall_seconds=TIMEOUT))
    status = int(ENUMS.IBV_WC_RETRY_EXC_ERR)
    with setup.links() as links:
        links[0].send(noise(20 * SLOT_BYTES, 1))
        with pytest.raises(LinkError, match=rf"last rail.*completion status {status}\)"):
            links[1].recv(noise(20 * SLOT_BYTES, 2)).wait()
    told = capfd.readouterr().err
    assert "no answer within 0.3 s to request 0" in told
    assert "ended with IBV_WC_RETRY_EXC_ERR" in told


def test_posting_does_not_wait_for_a_packet_that_is_being_put_into_memory(
    world: World, late_memory: LateMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    rails: list[Rail] = []
    connect = Rail.connect

    def remembered(rail: Rail, peer: Any) -> None:
        rails.append(rail)
        connect(rail, peer)

    monkeypatch.setattr(Rail, "connect", remembered)
    with patient(world).links() as links:
        work = links[1].recv(noise(SLOT_BYTES, 2))
        links[0].send(noise(SLOT_BYTES, 1))
        assert late_memory.reached.wait(TIMEOUT)
        for rail in rails:
            if rail.port.device.startswith("b"):
                rail.post_credit(0)
        assert time.monotonic() < late_memory.ready, "a post has waited"
        work.wait()


def test_the_first_failed_completion_says_why_and_what_is_flushed_comes_after(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.ack_seconds = 0.1
    world.devices["b0"].after(3, lambda device: device.break_with(Fault.DEAF))
    status = int(ENUMS.IBV_WC_RETRY_EXC_ERR)
    with caplog.at_level(logging.WARNING), Setup(world).links() as links:
        sending = links[0].send(noise(20 * SLOT_BYTES, 1))
        links[1].recv(noise(20 * SLOT_BYTES, 2)).wait()
        sending.wait()
    lost = [r.message for r in caplog.records if "rail 0 (a0:1) is lost" in r.message]
    assert len(lost) == 1
    assert f"completion status {status};" in lost[0]


def test_a_write_outside_every_region_is_told_with_all_regions_that_are_known(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    locate = PD.locate

    def lost(domain: PD, key: int, address: int, nbytes: int, access: int) -> int | None:
        at_rank_1 = domain.context.device.name.startswith("b")
        return None if at_rank_1 and access else locate(domain, key, address, nbytes, access)

    monkeypatch.setattr(PD, "locate", lost)
    with Setup(world).links() as links:
        links[0].send(noise(SLOT_BYTES, 1))
        with pytest.raises(LinkError, match="last rail"):
            links[1].recv(noise(SLOT_BYTES, 2)).wait()
    told = capfd.readouterr().err
    assert f"the peer may not write: no region has {SLOT_BYTES} bytes at 0x" in told
    # What the sender's request ended with is not told where rank 1 was quicker to stop the rail.
    assert "known are key " in told


def test_a_gpu_that_fails_under_a_copy_ends_the_rail_and_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(address: int) -> int | None:
        raise RuntimeError("CUDA error: an emulated one")

    monkeypatch.setattr(memory, "_device_of", fail)
    with Setup(world).links() as links:
        links[0].send(noise(SLOT_BYTES, 1))
        with pytest.raises(LinkError, match="last rail"):
            links[1].recv(noise(SLOT_BYTES, 2)).wait()
    told = capfd.readouterr().err
    assert f"reading {SLOT_BYTES} bytes" in told
    assert "failed (RuntimeError: CUDA error: an emulated one)" in told


def test_memory_that_took_long_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with memory._watched("b0", "writing 1 byte"):
        time.sleep(0.15)
    assert "emulated NIC b0" in (told := capfd.readouterr().err)
    assert "writing 1 byte took 0." in told
