"""RDMA between two GPUs' own memory and streams, over NICs that are copies.

*Emulated* NICs, both ends in one process: what is real is the GPUs' part, their streams that wait
for words and write them, their rings, and the order of all that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref

import pytest
import torch

from hetero.device.driver import driver_for
from hetero.device.gpu import GpuDevice
from hetero.link.ring_link import RingLink
from hetero.native.binding import CopyStep
from tests.gpus import gpu_of
from tests.hetero.link.verbs_ends import Setup
from tests.hetero.native.internals import internals
from tests.loopback_nic.library import Fault, LoopbackNics, lacking

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # One queue for all streams of a GPU would put the NIC's copies behind what waits for them.
    pytest.mark.skipif(
        os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1",
        reason="emulated NICs need a queue of their own; unset CUDA_DEVICE_MAX_CONNECTIONS",
    ),
]

RING_BYTES = 4 << 20
CHUNK_BYTES = 1 << 20
SIZES = (0, 1, 4099, CHUNK_BYTES, 3 * CHUNK_BYTES + 5, 5 * RING_BYTES)
MESSAGES = 12


@contextmanager
def reaching_gpus(nics: LoopbackNics) -> Iterator[LoopbackNics]:
    """NICs that reach the memory of all GPUs, by a stream that waits for nothing else."""
    device = torch.device("cuda", 0)
    driver, stream = driver_for(device), torch.cuda.Stream(device)
    entry = driver.entry_points

    def copy_between_gpus(target: int, source: int, nbytes: int) -> None:
        with driver.on_device(0):
            step = CopyStep(target=target, source=source, nbytes=nbytes)
            copied = internals().driver_copy(byref(entry), stream.cuda_stream, byref(step))
            assert copied == 0
            stream.synchronize()

    nics.copy_with(copy_between_gpus)
    try:
        yield nics
    finally:
        nics.copy_with(None)


@pytest.fixture(scope="module", autouse=True)
def opened_gpus(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One link has been used: CUDA opens files then and keeps them, which `nics` must not count.

    A module's fixtures are set up before its tests' own, so `nics` counts after this.
    """
    if lacking() is not None:
        return
    with (
        reaching_gpus(LoopbackNics(tmp_path_factory.mktemp("nics") / "sys")) as nics,
        nics.in_place(),
        setup(read_back=False).links() as (one, other),
    ):
        assert cross(one, other, nbytes=3 * CHUNK_BYTES, source=0)
        assert cross(other, one, nbytes=3 * CHUNK_BYTES, source=1)


@pytest.fixture
def gpu_nics(nics: LoopbackNics) -> Iterator[LoopbackNics]:
    with reaching_gpus(nics):
        yield nics


def setup(*, read_back: bool, transport: str = "verbs") -> Setup:
    gpus = gpu_of(0), gpu_of(1)
    return Setup(
        transport=transport,
        read_back=read_back,
        ring_bytes=RING_BYTES,
        chunk_bytes=CHUNK_BYTES,
        devices=tuple(GpuDevice(gpu) for gpu in gpus),
        tensors_on=gpus,
    )


def cross(sender: RingLink, receiver: RingLink, *, nbytes: int, source: int) -> bool:
    """Send from one end's GPU what a kernel has just made; whether the other's has the same."""
    here, there = gpu_of(source), gpu_of(1 - source)
    values = torch.arange(nbytes, device=here)
    with torch.cuda.device(here):
        sending = sender.send((values * 7 % 251).to(torch.uint8))
    with torch.cuda.device(there):
        target = torch.zeros(nbytes, dtype=torch.uint8, device=there)
        receiving = receiver.recv(target)
        receiving.wait()
        expected = (torch.arange(nbytes, device=target.device) * 7 % 251).to(torch.uint8)
        same = torch.equal(target, expected)
    with torch.cuda.device(here):
        sending.wait()
        torch.cuda.synchronize()
    sender.check()
    receiver.check()
    return same


@pytest.mark.parametrize("transport", ["verbs", "verbs-host"])
@pytest.mark.parametrize("read_back", [False, True], ids=["in-order", "read-back"])
def test_every_byte_crosses_both_ways(
    gpu_nics: LoopbackNics, transport: str, read_back: bool
) -> None:
    with setup(transport=transport, read_back=read_back).links() as (one, other):
        for nbytes in SIZES:
            assert cross(one, other, nbytes=nbytes, source=0), nbytes
            assert cross(other, one, nbytes=nbytes, source=1), nbytes


def test_a_lost_rail_costs_no_byte(gpu_nics: LoopbackNics) -> None:
    with setup(read_back=True).links() as (one, other):
        for number in range(MESSAGES):
            if number == MESSAGES // 3:
                gpu_nics["b0"].fault = Fault.CUT
            assert cross(one, other, nbytes=3 * CHUNK_BYTES + 1, source=0), number
