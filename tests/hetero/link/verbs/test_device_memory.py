"""Rings in a GPU's memory: how they are registered, and what makes a NIC's writes visible there.

The GPU is emulated, and so is its dma-buf, which begins somewhere before the memory.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch

from hetero.errors import LinkError
from hetero.link import verbs as opening
from tests.emulated_streams import EmulatedDevice
from tests.hetero.link.joined import MESSAGES, Both, stream
from tests.hetero.link.verbs.ends import RING_BYTES, Setup
from tests.loopback_nic.library import LoopbackNics

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
