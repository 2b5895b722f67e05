"""Opening: what both ends agree on, and how either's failure becomes both ends' error."""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace

import pytest
import torch

from hetero.device.cpu import CpuRuntime
from hetero.errors import LinkError
from hetero.transport.chunked import RingShape
from hetero.transport.verbs import joining, opening
from hetero.transport.verbs.joining import VerbsOptions
from hetero.transport.verbs.memory import Buffer, DeviceMemory, host_buffer
from tests.emulated_nic.world import World
from tests.hetero.transport.verbs.joined import SLOT_BYTES, STALL, Setup, exchange

OFFSET = 12288


@dataclass(frozen=True)
class EmulatedGpu:
    """A GPU driver over host memory, which exports an emulated dma-buf in the midst of another."""

    world: World

    def on_device(self, device: int) -> AbstractContextManager[None]:
        return nullcontext()

    def allocate(self, nbytes: int) -> int:
        raise NotImplementedError

    def free(self, address: int) -> None:
        raise NotImplementedError

    def can_export_dmabuf(self, device: int) -> bool:
        return True

    def export_dmabuf(self, address: int, nbytes: int) -> tuple[int, int]:
        descriptor = os.memfd_create("emulated dma-buf")
        self.world.dmabufs[os.fstat(descriptor).st_ino] = address - OFFSET
        return descriptor, OFFSET


class CountingRuntime(CpuRuntime):
    """Counts how often remote writes were made visible."""

    flushes = 0

    def make_remote_writes_visible(self) -> bool:
        CountingRuntime.flushes += 1
        return True


@pytest.fixture
def device_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """Both ends with their rings in the memory of an emulated GPU."""

    def buffer(nbytes: int, device: torch.device, driver: DeviceMemory, stack: ExitStack) -> Buffer:
        return replace(host_buffer(nbytes, CpuRuntime(), stack), driver=EmulatedGpu(world))

    monkeypatch.setattr(opening, "device_buffer", buffer)
    monkeypatch.setattr(opening, "driver_for", lambda device: EmulatedGpu(world))
    options = VerbsOptions(memory="device", stall_seconds=STALL)
    return replace(Setup(world), options=options, runtime=CountingRuntime())


def errors(setup: Setup) -> list[str]:
    """The texts of both ends' errors; opening must fail on both."""
    found = setup.attempt()
    assert all(isinstance(one, LinkError) for one in found), found
    return [str(one) for one in found]


def test_device_memory_is_registered_as_a_dmabuf_first_and_counts_from_its_beginning(
    world: World, device_memory: Setup
) -> None:
    for device in world.devices.values():
        device.registers_dmabuf = True
    with device_memory.ends() as (here, _):
        assert here.rails == ("a0:1 (dma-buf)", "a1:1 (dma-buf)")
    with device_memory.links() as links:
        exchange(links, messages=4, nbytes=20 * SLOT_BYTES + 1)


def test_device_memory_is_registered_by_address_where_dmabufs_are_not_supported(
    world: World, device_memory: Setup
) -> None:
    world.devices["a1"].registers_dmabuf = True
    with device_memory.ends() as (here, there):
        assert here.rails == ("a0:1 (address)", "a1:1 (dma-buf)")
        assert there.rails == ("b0:1 (address)", "b1:1 (address)")
    with device_memory.links() as links:
        exchange(links, messages=4, nbytes=20 * SLOT_BYTES + 1)


def test_what_a_nic_wrote_is_made_visible_before_every_chunk_is_handed_on(
    device_memory: Setup,
) -> None:
    with device_memory.links() as links:
        before = CountingRuntime.flushes
        exchange(links, messages=1, nbytes=5 * SLOT_BYTES)
        assert CountingRuntime.flushes - before == 10


class FlushlessRuntime(CpuRuntime):
    """An emulated GPU whose driver cannot make remote writes visible, as AMD's cannot."""

    def make_remote_writes_visible(self) -> bool:
        return False


@pytest.mark.parametrize("how", ["dma-buf", "address"])
def test_where_the_driver_cannot_make_writes_visible_they_are_read_back(
    world: World, device_memory: Setup, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    for device in world.devices.values():
        device.registers_dmabuf = how == "dma-buf"
        device.holds_writes = True
    setup = replace(device_memory, runtime=FlushlessRuntime())
    with caplog.at_level(logging.INFO), setup.ends() as (here, there):
        assert here.visibility == there.visibility == "a read-back over the NIC"
        assert here.rails == (f"a0:1 ({how})", f"a1:1 ({how})")
    said = [r.message for r in caplog.records if "a NIC's writes" in r.message]
    assert len(said) == 2, "each side says it once"
    assert all("visible by: a read-back over the NIC" in line for line in said)
    with setup.links() as links:
        exchange(links, messages=4, nbytes=20 * SLOT_BYTES + 1)


def test_where_the_driver_can_or_the_memory_is_the_hosts_nothing_is_read_back(
    world: World, device_memory: Setup
) -> None:
    with device_memory.links() as links:
        exchange(links, messages=1, nbytes=5 * SLOT_BYTES)
    with device_memory.ends() as (here, _):
        assert here.visibility == "the GPU's driver"
    with Setup(world).ends() as (here, _):
        assert here.visibility == "host memory"
    assert sum(device.reads for device in world.devices.values()) == 0


def test_a_gpu_whose_memory_cannot_be_registered_says_what_is_missing(
    world: World, device_memory: Setup
) -> None:
    world.devices["b1"].registers = False
    told, own = errors(device_memory)
    for word in ("b1:1", "dma-buf", "Errno: 95", "Errno: 14", "nvidia_peermem", "cpu-forward"):
        assert word in own
    assert "rank 1 says" in told
    assert "nvidia_peermem" in told


def test_host_memory_that_cannot_be_registered_says_what_may_be_locked(world: World) -> None:
    world.devices["a0"].registers = False
    own, told = errors(Setup(world))
    assert "ulimit -l" in own
    assert "rank 0 says" in told


def test_a_chunk_larger_than_a_port_carries_is_an_error(world: World) -> None:
    world.devices["b0"].max_message = SLOT_BYTES - 1
    told, own = errors(Setup(world))
    assert "choose smaller chunks" in own
    assert "choose smaller chunks" in told


def test_a_nic_with_too_short_queues_is_an_error(world: World) -> None:
    world.devices["b0"].max_requests = 20
    _, own = errors(Setup(world))
    assert "b0:1 takes 20 requests at once" in own


def test_a_nic_that_is_not_there_is_an_error_on_both_sides(world: World) -> None:
    own, told = errors(replace(Setup(world), nics=(("nowhere",), ("b0",))))
    assert "nowhere cannot be opened" in own
    assert "rank 0 says" in told


def test_an_end_without_pyverbs_tells_the_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> None:
        raise LinkError("RDMA needs pyverbs, which is not installed")

    monkeypatch.setattr(joining, "load", load)
    told, own = errors(replace(Setup(world), without_nics=1))
    assert "needs pyverbs" in own
    assert "rank 1 says: RDMA needs pyverbs" in told


def test_one_end_with_fewer_nics_uses_as_many_rails(world: World) -> None:
    with replace(Setup(world), nics=(("a0", "a1"), ("b1",))).ends() as (here, there):
        assert here.rails == ("a0:1 (address)",)
        assert there.rails == ("b1:1 (address)",)


def test_ends_with_different_rings_are_told_what_differs(world: World) -> None:
    setup = Setup(world)
    found = replace(setup, shape=RingShape(slots=4, slot_bytes=SLOT_BYTES))
    mixed = _Mixed(world, other=found)
    for text in errors(mixed):
        assert "slots is" in text


@dataclass(frozen=True)
class _Mixed(Setup):
    """Rank 1 opens as `other` would."""

    other: Setup | None = None

    def _open(self, rank: int, store: object) -> object:  # type: ignore[override]
        chosen = self.other if rank == 1 else Setup(self.world)
        assert chosen is not None
        return Setup._open(chosen, rank, store)  # type: ignore[arg-type]
