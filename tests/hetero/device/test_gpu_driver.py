"""The drivers on a GPU: NVIDIA's, and AMD's over the library that plays HIP (*simulated*)."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator

import pytest
import torch

from hetero.device.cuda_driver import CudaDriver
from hetero.device.driver_base import ALLOCATION_BYTES, GpuDriver
from hetero.device.hip_driver import HipDriver
from hetero.device.probe import probe_stream_values
from hetero.errors import LinkError
from megatron.hetero.checkpoint.snapshot import DeviceToHostCopier
from tests.hip_on_cuda.library import COMPILER, LACKING, hip_over_cuda_driver

GPUS = torch.cuda.device_count()
SECONDS = 10.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="NOT CHECKED: no GPU on this machine"),
]


def make(kind: str) -> GpuDriver:
    """A driver of one kind; the same in a child process."""
    if kind == "amd":
        return HipDriver()
    return CudaDriver() if kind == "nvidia" else hip_over_cuda_driver()


@pytest.fixture(params=["amd"] if torch.version.hip else ["nvidia", "amd simulated"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "amd simulated" and COMPILER is None:
        pytest.skip(f"NOT CHECKED: {LACKING}")
    return str(request.param)


@pytest.fixture
def driver(kind: str) -> GpuDriver:
    torch.cuda.set_device(0)
    driver = make(kind)
    driver.use_device(0)
    return driver


class Page:
    """A registered page of host memory, seen as 32-bit words."""

    def __init__(self, driver: GpuDriver) -> None:
        self.words = (ctypes.c_uint32 * 1024).from_buffer(mmap.mmap(-1, 4096))
        self.host = ctypes.addressof(self.words)
        driver.register_host(self.host, 4096)
        self.device = driver.device_address(self.host)


@pytest.fixture
def page(driver: GpuDriver) -> Iterator[Page]:
    page = Page(driver)
    yield page
    torch.cuda.synchronize()
    driver.unregister_host(page.host)


@pytest.fixture
def memory(driver: GpuDriver) -> Iterator[int]:
    address = driver.allocate(ALLOCATION_BYTES)
    yield address
    torch.cuda.synchronize()
    driver.free(address)


@pytest.fixture
def stream() -> torch.cuda.Stream:
    return torch.cuda.Stream(0)


def ended(stream: torch.cuda.Stream) -> bool:
    deadline = time.monotonic() + SECONDS
    while not stream.query() and time.monotonic() < deadline:
        time.sleep(0.001)
    return stream.query()


def test_a_counter_wraps_around_on_cuda(driver, page, stream) -> None:
    if driver.vendor != "nvidia":
        pytest.skip("HIP does not wrap; its driver refuses such values")
    page.words[0] = 2**32 - 2
    driver.stream_wait_value(stream.cuda_stream, page.device, 2**32 + 1)
    time.sleep(0.02)
    assert not stream.query()
    page.words[0] = 1
    assert ended(stream)


def test_the_probe_passes(driver) -> None:
    assert probe_stream_values(driver, 0) is None


def test_allocations_begin_with_a_page_of_the_gpu(driver) -> None:
    addresses = [driver.allocate(size) for size in (1, ALLOCATION_BYTES, 5 * 2**20)]
    for address in addresses:
        driver.free(address)
    assert [address % ALLOCATION_BYTES for address in addresses] == [0, 0, 0]


def test_too_much_memory_is_an_error_in_words(driver) -> None:
    with pytest.raises(LinkError, match=r"to allocate .* bytes of GPU memory; free memory"):
        driver.allocate(2**50)
    # PyTorch finds no error of ours.
    assert torch.ones(4, device="cuda:0").sum().item() == 4


def test_memory_that_is_not_registered_has_no_device_address(driver) -> None:
    words = (ctypes.c_uint32 * 4096).from_buffer(mmap.mmap(-1, 16384))
    with pytest.raises(LinkError, match="register the memory first"):
        driver.device_address(ctypes.addressof(words))


def test_a_handle_that_is_none_is_an_error_in_words(driver) -> None:
    with pytest.raises(LinkError, match="both processes must run on one host"):
        driver.open_ipc(bytes(64))


def test_devices_have_places_on_the_bus(driver) -> None:
    assert len({driver.pci_bus_id(device) for device in range(GPUS)}) == GPUS
    assert driver.pci_bus_id(0).endswith((".0", ".1"))


def test_device_memory_is_exported_as_a_dmabuf(driver, memory) -> None:
    if not driver.can_export_dmabuf(0):
        pytest.skip("NOT CHECKED: this GPU or kernel has no dma-buf")
    try:
        descriptor, offset = driver.export_dmabuf(memory + 100, 8192)
    except LinkError as error:
        pytest.skip(f"NOT CHECKED: {error}")
    try:
        assert offset == 100
        assert "dmabuf" in os.readlink(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def test_the_current_device_is_restored(driver) -> None:
    if GPUS < 2:
        pytest.skip(f"NOT CHECKED: needs two GPUs, this machine has {GPUS}")
    with driver.on_device(1):
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0


def test_copies_pins_and_copies_over_a_given_driver(driver) -> None:
    device = torch.device("cuda", 0)
    copies = DeviceToHostCopier(device, driver=driver)
    host = torch.frombuffer(mmap.mmap(-1, 2**20), dtype=torch.uint8)
    copies.register(host)
    assert host.is_pinned()
    source = torch.randint(0, 256, (2**20,), dtype=torch.uint8, device=device)
    copied = copies.copy(host, source, after=copies.record_event())
    assert copied is not None
    copied.synchronize()
    assert torch.equal(host, source.cpu())
    copies.unregister(host)
    assert not host.is_pinned()
