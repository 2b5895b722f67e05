"""What a driver says when its library fails, and what it does about it; over a fake library."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hetero.device import cuda_driver, hip_driver
from hetero.device.cuda_driver import Attribute, CudaDriver
from hetero.device.driver import HIP_LIBRARY_VARIABLE, driver_for
from hetero.device.driver_base import ALLOCATION_BYTES, GpuDriver, whole_allocation
from hetero.device.hip_driver import HipDriver
from hetero.errors import LinkError
from megatron.hetero.checkpoint.snapshot import DeviceToHostCopier
from tests.hetero.device.fake_library import FakeLibrary

Use = Callable[[GpuDriver], object]

HANDLE = bytes(64)
USES: dict[str, tuple[str, str, Use, str]] = {
    "wait": (
        "cuStreamWaitValue32_v2",
        "hipStreamWaitValue32",
        lambda d: d.stream_wait_value(1, 0x1000, 7),
        "make a stream wait for 7 at 0x1000",
    ),
    "write": (
        "cuStreamWriteValue32_v2",
        "hipStreamWriteValue32",
        lambda d: d.stream_write_value(1, 0x1000, 7),
        "make a stream write 7 at 0x1000",
    ),
    "register": (
        "cuMemHostRegister_v2",
        "hipHostRegister",
        lambda d: d.register_host(0x1000, 4096),
        "pin 4096 bytes of host memory at 0x1000; raise the locked-memory limit (ulimit -l)",
    ),
    "unregister": (
        "cuMemHostUnregister",
        "hipHostUnregister",
        lambda d: d.unregister_host(0x1000),
        "unpin host memory at 0x1000",
    ),
    "device address": (
        "cuMemHostGetDevicePointer_v2",
        "hipHostGetDevicePointer",
        lambda d: d.device_address(0x1000),
        "find host memory at 0x1000 from the GPU; register the memory first",
    ),
    "allocate": (
        "cuMemAlloc_v2",
        "hipMalloc",
        lambda d: d.allocate(100),
        "allocate 100 bytes of GPU memory; free memory",
    ),
    "free": ("cuMemFree_v2", "hipFree", lambda d: d.free(0x1000), "free GPU memory at 0x1000"),
    "share": (
        "cuIpcGetMemHandle",
        "hipIpcGetMemHandle",
        lambda d: d.ipc_handle(0),
        "share GPU memory at 0x0",
    ),
    "open": (
        "cuIpcOpenMemHandle_v2",
        "hipIpcOpenMemHandle",
        lambda d: d.open_ipc(HANDLE),
        "open another process's GPU memory; both processes must run on one host",
    ),
    "close": (
        "cuIpcCloseMemHandle",
        "hipIpcCloseMemHandle",
        lambda d: d.close_ipc(0x1000),
        "close shared GPU memory at 0x1000",
    ),
    "bus": (
        "cuDeviceGetPCIBusId",
        "hipDeviceGetPCIBusId",
        lambda d: d.pci_bus_id(3),
        "ask where GPU 3 sits",
    ),
}

FAKES = {"cuda": ("fake_cuda", CudaDriver, 0), "hip": ("fake_hip", HipDriver, 1)}


@pytest.fixture(params=FAKES)
def fake(request: pytest.FixtureRequest) -> tuple[FakeLibrary, GpuDriver, int]:
    """The library, the driver over it, and which of a use's two names is its own."""
    fixture, driver, which = FAKES[request.param]
    library: FakeLibrary = request.getfixturevalue(fixture)
    return library, driver(library.path), which


@pytest.mark.parametrize("use", USES)
def test_a_failure_names_the_call_the_error_the_purpose_and_the_remedy(use, fake) -> None:
    library, driver, which = fake
    name, act, words = USES[use][which], USES[use][2], USES[use][3]
    act(driver)
    assert name in library.calls()
    library.fail(name, 999)
    with pytest.raises(LinkError) as failure:
        act(driver)
    assert str(failure.value).startswith(f"{name} failed (NAME_OF_ERROR: its words) to {words}")


def test_a_thread_without_a_device_is_told_to_set_one(fake) -> None:
    library, driver, which = fake
    library.fail(USES["wait"][which], 201)
    with pytest.raises(LinkError, match=r"call use_device\(\) in this thread first"):
        driver.stream_wait_value(0, 0, 1)


def test_a_driver_that_does_not_start_says_so(fake_cuda) -> None:
    fake_cuda.fail("cuInit", 100)
    with pytest.raises(LinkError, match=r"cuInit failed .* to start the driver; check nvidia-smi"):
        CudaDriver(fake_cuda.path)


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match=r"none\.so.*install NVIDIA's driver"):
        CudaDriver(str(tmp_path / "none.so"))
    with pytest.raises(LinkError, match=r"none\.so.*install ROCm 5\.2"):
        HipDriver(str(tmp_path / "none.so"))


def test_a_library_too_old_names_what_it_lacks(compiler, tmp_path: Path) -> None:
    old = FakeLibrary(tmp_path, cuda_driver.SYMBOLS, lacking=["cuStreamWaitValue32_v2"])
    with pytest.raises(LinkError, match="lacks cuStreamWaitValue32_v2; install NVIDIA's driver"):
        CudaDriver(old.path)


def test_hip_forgets_an_error_that_pytorch_would_find(fake_hip) -> None:
    driver = HipDriver(fake_hip.path)
    fake_hip.fail("hipFree", 1)
    fake_hip.forget()
    with pytest.raises(LinkError):
        driver.free(0x1000)
    assert fake_hip.calls() == ["hipFree", "hipGetLastError"]


def test_hip_refuses_to_wait_where_its_comparison_would_be_wrong(fake_hip) -> None:
    driver = HipDriver(fake_hip.path)
    driver.stream_wait_value(1, 0x1000, 3 * 2**30 - 1)
    with pytest.raises(LinkError, match="close the link and open it again"):
        driver.stream_wait_value(1, 0x1000, 3 * 2**30)


def test_hip_exports_a_dmabuf_through_hsa(fake_hip) -> None:
    driver = HipDriver(fake_hip.path)
    fake_hip.forget()
    assert driver.export_dmabuf(0x1000, 64) == (-1, 0)
    assert fake_hip.calls() == ["hsa_amd_portable_export_dmabuf"]
    fake_hip.fail("hsa_amd_portable_export_dmabuf", 4096)
    with pytest.raises(LinkError, match=r"failed \(HSA words\) to export 64 bytes"):
        driver.export_dmabuf(0x1000, 64)


def test_a_hip_too_old_for_dmabufs(compiler, tmp_path: Path) -> None:
    driver = HipDriver(FakeLibrary(tmp_path, hip_driver.SYMBOLS).path)
    assert not driver.can_export_dmabuf(0)
    with pytest.raises(LinkError, match=r"install ROCm 5\.3 or newer"):
        driver.export_dmabuf(0x1000, 64)


def test_a_cuda_dmabuf_begins_with_a_page(fake_cuda) -> None:
    assert CudaDriver(fake_cuda.path).export_dmabuf(0x12345, 64)[1] == 0x12345 % 4096


def test_a_device_is_current_within_a_block_only_also_if_it_fails(fake) -> None:
    library, driver, which = fake
    setter = ("cuCtxSetCurrent", "hipSetDevice")[which]
    library.forget()
    library.fail(USES["free"][which], 1)
    with pytest.raises(LinkError), driver.on_device(1):
        driver.free(0x1000)
    calls = library.calls()
    failed_at = calls.index(USES["free"][which])
    assert (calls[:failed_at].count(setter), calls[failed_at:].count(setter)) == (1, 1)


@pytest.mark.parametrize(
    ("nbytes", "whole"),
    [(0, 1), (1, 1), (ALLOCATION_BYTES, 1), (ALLOCATION_BYTES + 1, 2)],
)
def test_allocations_are_whole(nbytes: int, whole: int) -> None:
    assert whole_allocation(nbytes) == whole * ALLOCATION_BYTES


def test_calls_from_many_threads(fake) -> None:
    _, driver, _ = fake

    def use(thread: int) -> None:
        driver.use_device(0)
        for _ in range(200):
            driver.stream_write_value(1, 0x1000, 7)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(use, range(4), timeout=120)) == [None] * 4


@pytest.mark.parametrize(("ordering", "needed"), [(100, False), (200, False), (0, True)])
def test_a_nic_reads_back_where_cuda_does_not_order_its_writes(
    fake_cuda, ordering: int, needed: bool
) -> None:
    fake_cuda.set_attribute(Attribute.GPU_DIRECT_RDMA_WRITES_ORDERING, ordering)
    assert CudaDriver(fake_cuda.path).remote_writes_need_flush(0) is needed


def test_a_nic_always_reads_back_from_hip(fake_hip) -> None:
    assert HipDriver(fake_hip.path).remote_writes_need_flush(0)


def test_copies_pin_memory_and_close_after_an_error_of_the_gpu(fake, monkeypatch) -> None:
    # No GPU is here to make a stream on.
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
    library, driver, which = fake
    copies = DeviceToHostCopier(torch.device("cuda", 0), driver=driver)
    host = torch.zeros(4096, dtype=torch.uint8)
    library.forget()
    copies.register(host)
    assert USES["register"][which] in library.calls()
    library.fail(USES["unregister"][which], 719)
    copies.unregister(host)
    assert USES["unregister"][which] in library.calls()


def test_an_environment_variable_has_amd_simulated(fake_hip, monkeypatch) -> None:
    monkeypatch.setenv(HIP_LIBRARY_VARIABLE, fake_hip.path)
    device = torch.device("cuda", 0)
    with pytest.warns(UserWarning, match="AMD is simulated"):
        driver = driver_for(device)
    assert driver.vendor == "amd"
    assert driver_for(device) is driver


def test_a_cpu_has_no_driver() -> None:
    with pytest.raises(ValueError, match="cpu has no GPU driver"):
        driver_for(torch.device("cpu"))
