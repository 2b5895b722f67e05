"""The memory of a link's rings, and its registration with a NIC.

A buffer is registered once with every rail and stays where it is until the link is closed.
"""

from __future__ import annotations

import mmap
import os
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hetero.device.base import DeviceRuntime
from hetero.errors import LinkError
from hetero.transport.verbs.library import Verbs


class DeviceMemory(Protocol):
    """The part of hetero.device.driver_base.GpuDriver that is used."""

    def on_device(self, device: int) -> AbstractContextManager[None]: ...
    def allocate(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def can_export_dmabuf(self, device: int) -> bool: ...
    def export_dmabuf(self, address: int, nbytes: int) -> tuple[int, int]: ...


@dataclass(frozen=True)
class Buffer:
    """Memory that a NIC may read and write, as bytes."""

    data: torch.Tensor
    address: int
    driver: DeviceMemory | None = None
    """Of the GPU that the memory belongs to; None for host memory."""
    device: int = 0

    @property
    def nbytes(self) -> int:
        return self.data.numel()


@dataclass(frozen=True)
class Registration:
    """A buffer as one NIC knows it."""

    region: Any
    base: int
    """The buffer's first byte in the NIC's terms: its address or, for a dma-buf, its offset."""
    how: str

    @property
    def lkey(self) -> int:
        return int(self.region.lkey)

    @property
    def rkey(self) -> int:
        return int(self.region.rkey)


def host_buffer(nbytes: int, runtime: DeviceRuntime, stack: ExitStack) -> Buffer:
    """Pinned host memory, given back when the stack unwinds."""
    area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A child of this process must not share the pages: the NIC would write to one side's copy.
    area.madvise(mmap.MADV_DONTFORK)
    data = torch.frombuffer(area, dtype=torch.uint8)
    runtime.register(data)
    # torch holds the mapping: it goes with the last tensor over it.
    stack.callback(runtime.unregister, data)
    return Buffer(data=data, address=data.data_ptr())


def device_buffer(
    nbytes: int, device: torch.device, driver: DeviceMemory, stack: ExitStack
) -> Buffer:
    """Memory of a GPU in an allocation of its own, given back when the stack unwinds."""
    index = index_of(device)
    with driver.on_device(index):
        address = driver.allocate(nbytes)

    def free() -> None:
        with driver.on_device(index):
            driver.free(address)

    stack.callback(free)
    data = torch.as_tensor(_Foreign(address, nbytes), device=device)
    return Buffer(data=data, address=address, driver=driver, device=index)


def index_of(device: torch.device) -> int:
    """The number of a GPU in this process; of the current one where the device says none."""
    return torch.cuda.current_device() if device.index is None else device.index


class _Foreign:
    """Memory that another library allocated, in the form in which torch takes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def register(
    verbs: Verbs, domain: Any, buffer: Buffer, *, nic: str, is_read: bool = False
) -> Registration:
    """Register a buffer, to be written by the peer and perhaps read, with a domain's NIC.

    Memory of a GPU is tried as a dma-buf first, then by its address. Raises LinkError with every
    attempt's error and what is needed for one of them to work.
    """
    # Without IBV_ACCESS_RELAXED_ORDERING: a read-back shows only what is strictly ordered.
    access = verbs.enums.IBV_ACCESS_LOCAL_WRITE | verbs.enums.IBV_ACCESS_REMOTE_WRITE
    if is_read:
        access |= verbs.enums.IBV_ACCESS_REMOTE_READ
    failures = []
    if buffer.driver is not None:
        try:
            return _register_dmabuf(verbs, domain, buffer, buffer.driver, access)
        except (verbs.error, LinkError) as error:
            failures.append(f"as a dma-buf: {error}")
    try:
        region = verbs.MR(domain, buffer.nbytes, access, address=buffer.address)
        return Registration(region, base=buffer.address, how="address")
    except verbs.error as error:
        failures.append(f"by address: {error}")
    remedy = registration_remedy(of_gpu=buffer.driver is not None)
    kind = "host" if buffer.driver is None else "GPU"
    raise LinkError(
        f"{nic} refused to register {buffer.nbytes} bytes of {kind} memory "
        f"({'; '.join(failures)}); {remedy}"
    )


def registration_remedy(*, of_gpu: bool) -> str:
    """What to do where a NIC refuses to register host memory or that of a GPU."""
    if not of_gpu:
        return "raise the locked-memory limit (ulimit -l) or make the ring smaller"
    return (
        "RDMA to a GPU needs dma-buf (Linux 5.12, the GPU vendor's open kernel driver and a "
        "NIC driver that supports it) or the vendor's peer memory module (nvidia_peermem; for "
        "AMD, amdgpu with ROCm's peer memory support): load one, or choose --hetero-transport "
        "cpu-forward"
    )


def _register_dmabuf(
    verbs: Verbs, domain: Any, buffer: Buffer, driver: DeviceMemory, access: int
) -> Registration:
    if not driver.can_export_dmabuf(buffer.device):
        raise LinkError("the GPU's driver exports none")
    with driver.on_device(buffer.device):
        descriptor, offset = driver.export_dmabuf(buffer.address, buffer.nbytes)
    try:
        region = verbs.DmaBufMR(domain, buffer.nbytes, access, dmabuf=descriptor, offset=offset)
    finally:
        # The registration holds the buffer itself.
        os.close(descriptor)
    # pyverbs registers it so that the NIC's addresses count from the beginning of the dma-buf.
    return Registration(region, base=offset, how="dma-buf")
