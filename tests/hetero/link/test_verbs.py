"""A link over RDMA: opening it, rails, rings in a GPU's memory. NICs and GPU are emulated."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import pytest
import torch

from hetero.errors import LinkError
from hetero.link import verbs as joining
from hetero.link import verbs as opening
from tests.emulated_streams import EmulatedDevice
from tests.hetero.link.joined import (
    MESSAGES,
    Both,
    assert_both_ways_arrive,
    at,
    stream,
    threads_named,
    times_asleep,
    wait_for,
)
from tests.hetero.link.verbs_ends import CHUNK_BYTES, RING_BYTES, Setup
from tests.loopback_nic.library import Fault, LoopbackNics

NBYTES = 3 * CHUNK_BYTES + 1
SIZES = (0, 1, 511, 5000, 2 * RING_BYTES)


def test_two_rails_share_the_entries_of_a_message(nics: LoopbackNics) -> None:
    """Of small entries several are under way at once, sooner or later."""
    with Setup(chunk_bytes=4096).links() as (one, other):
        stream(one, other, nbytes=NBYTES)
    assert min(nics["b0"].writes, nics["b1"].writes) > 0


@pytest.mark.parametrize("name", ["a0", "b0"], ids=["at-the-sender", "at-the-receiver"])
@pytest.mark.parametrize("fault", [Fault.CUT, Fault.SILENT], ids=str)
@pytest.mark.parametrize("read_back", [False, True], ids=["in-order", "read-back"])
def test_one_lost_rail_of_two_costs_no_byte_and_both_ends_say_so(
    nics: LoopbackNics,
    name: str,
    fault: Fault,
    read_back: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def said() -> bool:
        lost = [line for line in caplog.messages if "is lost" in line]
        return all(any(rail in line for line in lost) for rail in ("(a0:1)", "(b0:1)"))

    strike = at(MESSAGES // 3, lambda: setattr(nics[name], "fault", fault))
    with caplog.at_level(logging.WARNING), Setup(read_back=read_back).links() as links:
        assert stream(*links, nbytes=NBYTES, before=strike) == MESSAGES
        # A rail that was slow for a moment, on a busy machine, is not asked again at once.
        assert wait_for(
            lambda: said() or (stream(*links, nbytes=NBYTES) == MESSAGES and said()), seconds=60
        )


def test_a_failed_completion_channel_loses_the_rail_and_no_thread_spins(
    nics: LoopbackNics, caplog: pytest.LogCaptureFixture
) -> None:
    strike = at(3, lambda: nics.end_completion_events("b0"))
    with caplog.at_level(logging.WARNING), Setup().links() as links:
        assert stream(*links, nbytes=NBYTES, before=strike) == MESSAGES
        assert wait_for(
            lambda: any("(b0:1) is lost: its completion channel" in m for m in caplog.messages)
        )
        assert stream(*links, nbytes=NBYTES) == MESSAGES
        assert wait_for(lambda: _share_of_a_core() < 0.5)


def test_what_landed_on_a_rail_that_cannot_read_it_back_comes_again(nics: LoopbackNics) -> None:
    """The sender's NIC has said that it arrived: only the receiver's end knows better."""
    for name in ("b0", "b1"):
        nics[name].holds_writes = True
    strike = at(MESSAGES // 2, lambda: setattr(nics["b0"], "cannot_read", True))
    with Setup(read_back=True).links() as links:
        assert stream(*links, nbytes=NBYTES, before=strike) == MESSAGES


@pytest.mark.parametrize("seed", range(6))
def test_a_fault_of_any_kind_at_any_time_costs_no_byte(nics: LoopbackNics, seed: int) -> None:
    """Both ways at once, with many sizes, over two rails of which one is lost on the way."""
    chance = random.Random(seed)
    read_back = chance.random() < 0.5
    name = chance.choice("ab") + chance.choice("01")
    strike = chance.choice(
        [
            lambda: setattr(nics[name], "fault", Fault.CUT),
            lambda: setattr(nics[name], "fault", Fault.SILENT),
            lambda: setattr(nics[name], "cannot_read", True),
        ]
    )
    when = chance.randrange(MESSAGES)
    if read_back:
        nics[name].holds_writes = True
    chunk_bytes = chance.choice([512, 4096, CHUNK_BYTES])
    with Setup(read_back=read_back, chunk_bytes=chunk_bytes).links() as links:
        assert_both_ways_arrive(links, chance, sizes=SIZES, before=at(when, strike))


def test_an_idle_link_s_carriers_never_wake(nics: LoopbackNics) -> None:
    with Setup().links() as links:
        stream(*links, nbytes=NBYTES)
        carriers = [task.name for task in threads_named("hetero-proxy")]
        assert len(carriers) == 1

        def is_asleep() -> bool:
            before = times_asleep(carriers)
            time.sleep(0.5)
            return times_asleep(carriers) == before

        # At once or, on a busy machine, once it has come to an end of what it did.
        assert wait_for(is_asleep)


def test_a_carrier_takes_no_signal_away_from_python(nics: LoopbackNics) -> None:
    with Setup().links():
        for task in threads_named("hetero-proxy"):
            (blocked,) = re.findall(r"SigBlk:\s*(\w+)", (task / "status").read_text())
            assert int(blocked, 16) & (1 << (signal.SIGINT - 1))
            assert int(blocked, 16) & (1 << (signal.SIGTERM - 1))


def _share_of_a_core() -> float:
    """What all threads of this process use while nothing is sent."""
    time.sleep(0.2)
    begin, used = time.monotonic(), time.process_time()
    time.sleep(0.2)
    return (time.process_time() - used) / (time.monotonic() - begin)


def test_host_memory_that_cannot_be_registered_says_what_may_be_locked(nics: LoopbackNics) -> None:
    nics["a0"].refuses_memory = True
    own, told = Setup().errors()
    assert "ulimit -l" in own
    assert "rank 0 says" in told


def test_a_chunk_larger_than_a_port_carries_is_an_error(nics: LoopbackNics) -> None:
    nics["b0"].max_message = CHUNK_BYTES - 1
    for error in Setup().errors():
        assert "choose smaller chunks" in error


def test_a_nic_with_too_short_queues_is_an_error(nics: LoopbackNics) -> None:
    nics["b0"].max_requests = 20
    _, own = Setup().errors()
    assert "b0:1 cannot be used for RDMA: it takes 20 requests at once" in own


def test_a_nic_that_is_not_there_is_an_error_at_both_ends(nics: LoopbackNics) -> None:
    own, told = replace(Setup(), names=(("nowhere",), ("b0",))).errors()
    assert "nowhere:1 the device cannot be opened" in own
    assert "rank 0 says" in told


def test_an_end_that_cannot_look_for_its_nics_tells_the_other(
    nics: LoopbackNics, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = joining.find_ports

    def find(devices: tuple[str, ...], **options: object) -> object:
        if "b0" in devices:
            raise LinkError("libibverbs is out of order")
        return real(devices, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(joining, "find_ports", find)
    told, own = Setup().errors()
    assert "libibverbs is out of order" in own
    assert "rank 1 says: libibverbs is out of order" in told


def test_one_end_with_fewer_nics_uses_as_many_rails(
    nics: LoopbackNics, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level("INFO", "hetero"),
        replace(Setup(), names=(("a0", "a1"), ("b1",))).links(),
    ):
        pass
    rails = [line.partition(": over ")[2] for line in caplog.messages if ": over " in line]
    assert sorted(rails) == ["a0:1 (by address)", "b1:1 (by address)"]


OFFSET = 4096
GPU = torch.device("cuda", 0)


@dataclass
class EmulatedDriver:
    """The part of a GPU's driver that opening a link asks."""

    nics: LoopbackNics
    needs_flush: bool = False
    offers_dmabuf: bool = True
    exports_dmabuf: bool = True
    registers_dmabuf: bool = True
    exported: list[int] = field(default_factory=list)

    def on_device(self, device: int) -> AbstractContextManager[None]:
        return nullcontext()

    def remote_writes_need_flush(self, device: int) -> bool:
        return self.needs_flush

    def can_export_dmabuf(self, device: int) -> bool:
        return self.offers_dmabuf

    def export_dmabuf(self, address: int, nbytes: int) -> tuple[int, int]:
        if not self.exports_dmabuf:
            raise LinkError("the driver refuses")
        descriptor = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self.nics.know_dmabuf(descriptor, address - OFFSET if self.registers_dmabuf else 0)
        self.exported.append(descriptor)
        return descriptor, OFFSET


def on_emulated_gpus(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """Both ends with their rings in the memory of a GPU."""
    monkeypatch.setattr(opening, "driver_for", lambda device: driver)
    monkeypatch.setattr(opening, "index_of", lambda device: 0)
    devices = EmulatedDevice(), EmulatedDevice()
    return Setup(tensors_on=(GPU, GPU), devices=devices)


def carries(links: Both) -> bool:
    """Whether messages of several rings arrive each way."""
    both_ways = links, links[::-1]
    return all(stream(*ends, nbytes=3 * RING_BYTES + 1) == MESSAGES for ends in both_ways)


@pytest.mark.parametrize(
    ("lacks", "how"),
    [
        (None, "dma-buf"),
        ("offers_dmabuf", "address"),
        ("exports_dmabuf", "address"),
        ("registers_dmabuf", "address"),
    ],
)
def test_it_is_registered_as_a_dmabuf_or_else_by_its_address(
    nics: LoopbackNics,
    lacks: str | None,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = EmulatedDriver(nics)
    if lacks is not None:
        setattr(driver, lacks, False)
    setup = on_emulated_gpus(driver, monkeypatch)
    with caplog.at_level("INFO", "hetero"), setup.links() as links:
        assert carries(links)
    assert any(f"over a0:1 (by {how}), a1:1 (by {how})" in line for line in caplog.messages)


def test_memory_that_no_way_registers_is_an_error_at_both_ends_with_the_remedy(
    nics: LoopbackNics, monkeypatch: pytest.MonkeyPatch
) -> None:
    nics["b1"].refuses_memory = True
    driver = EmulatedDriver(nics, registers_dmabuf=False)
    first, second = on_emulated_gpus(driver, monkeypatch).errors()
    for error in (first, second):
        assert (
            f"b1:1 cannot be used for RDMA: it refused to register {2 * RING_BYTES} bytes" in error
        )
        assert "as a dma-buf: Operation not supported; by address: Cannot allocate memory" in error
        assert "nvidia_peermem" in error
    assert "rank 1 says" in first


@pytest.mark.parametrize(
    ("needs_flush", "by"), [(True, "a read-back over the NIC"), (False, "the GPU itself")]
)
def test_the_nic_reads_back_where_the_gpu_does_not_order_its_writes(
    nics: LoopbackNics, needs_flush: bool, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a0", "a1", "b0", "b1"):
        nics[name].holds_writes = needs_flush
    driver = EmulatedDriver(nics, needs_flush=needs_flush)
    with on_emulated_gpus(driver, monkeypatch).links() as links:
        assert carries(links)
        assert links[0].detail.endswith(f"by {by}")
    assert [nics[name].reads > 0 for name in ("a0", "b0")] == [needs_flush] * 2
