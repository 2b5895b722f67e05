"""NVIDIA's driver API (libcuda), as far as transports need it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from typing import ClassVar

from hetero.device.driver_base import GpuDriver, IpcHandle
from hetero.device.vendor_library import Symbol, bind, calls_of, load
from hetero.native.binding import Vendor

LIBRARY = "libcuda.so.1"
_REMEDY = "install NVIDIA's driver, 515 or newer"


class Attribute(IntEnum):
    """CUdevice_attribute."""

    GPU_DIRECT_RDMA_WRITES_ORDERING = 118
    DMA_BUF_SUPPORTED = 124


DMA_BUF_FD = 0x1
ORDERED_FOR_OWNER = 100
"""CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER."""

# CUdeviceptr, CUdevice, and pointers to CUcontext, CUstream and CUevent.
_address, _device, _context, _stream, _event = c_uint64, c_int, c_void_p, c_void_p, c_void_p

SYMBOLS = (
    Symbol("cuInit", (c_uint,)),
    Symbol("cuGetErrorName", (c_int, POINTER(c_char_p))),
    Symbol("cuGetErrorString", (c_int, POINTER(c_char_p))),
    Symbol("cuDeviceGet", (POINTER(_device), c_int)),
    Symbol("cuDeviceGetAttribute", (POINTER(c_int), c_int, _device)),
    Symbol("cuDeviceGetPCIBusId", (c_char_p, c_int, _device), "pci_bus_id"),
    Symbol("cuDevicePrimaryCtxRetain", (POINTER(_context), _device)),
    Symbol("cuCtxGetCurrent", (POINTER(_context),)),
    Symbol("cuCtxSetCurrent", (_context,), "set_current"),
    Symbol("cuStreamWaitValue32_v2", (_stream, _address, c_uint32, c_uint), "wait_value"),
    Symbol("cuStreamWriteValue32_v2", (_stream, _address, c_uint32, c_uint), "write_value"),
    Symbol("cuMemcpyAsync", (_address, _address, c_size_t, _stream), "copy"),
    Symbol("cuEventRecord", (_event, _stream), "record_event"),
    Symbol("cuStreamWaitEvent", (_stream, _event, c_uint), "wait_event"),
    Symbol("cuStreamSynchronize", (_stream,), "synchronize_stream"),
    Symbol("cuEventSynchronize", (_event,), "synchronize_event"),
    Symbol("cuMemHostRegister_v2", (c_void_p, c_size_t, c_uint), "register_host"),
    Symbol("cuMemHostUnregister", (c_void_p,), "unregister_host"),
    Symbol("cuMemHostGetDevicePointer_v2", (POINTER(_address), c_void_p, c_uint), "device_address"),
    Symbol("cuMemAlloc_v2", (POINTER(_address), c_size_t), "allocate"),
    Symbol("cuMemFree_v2", (_address,), "free"),
    Symbol("cuIpcGetMemHandle", (POINTER(IpcHandle), _address), "ipc_handle"),
    Symbol("cuIpcOpenMemHandle_v2", (POINTER(_address), IpcHandle, c_uint), "open_ipc"),
    Symbol("cuIpcCloseMemHandle", (_address,), "close_ipc"),
    Symbol("cuMemGetHandleForAddressRange", (c_void_p, _address, c_size_t, c_int, c_uint64)),
)


class CudaDriver(GpuDriver):
    """NVIDIA GPUs through libcuda."""

    vendor: ClassVar[str] = "nvidia"
    host_words_documented: ClassVar[bool] = True
    calls: ClassVar[Mapping[str, str]] = calls_of(SYMBOLS)
    _vendor_in_c = Vendor.CUDA

    def __init__(self, library: str = LIBRARY) -> None:
        super().__init__(bind(load([library], remedy=_REMEDY), SYMBOLS, remedy=_REMEDY))
        self._contexts: dict[int, int] = {}
        self._call("cuInit", 0, purpose="start the driver", remedy="check nvidia-smi")

    def can_export_dmabuf(self, device: int) -> bool:
        return bool(self._attribute(device, Attribute.DMA_BUF_SUPPORTED))

    def export_dmabuf(self, address: int, nbytes: int) -> tuple[int, int]:
        # The range must begin and end with pages of the host; allocations do.
        page = os.sysconf("SC_PAGESIZE")
        offset = address % page
        descriptor = c_int(-1)
        self._call(
            "cuMemGetHandleForAddressRange",
            ctypes.addressof(descriptor),
            address - offset,
            -(-(offset + nbytes) // page) * page,
            DMA_BUF_FD,
            0,
            purpose=f"export {nbytes} bytes of GPU memory at {address:#x} as a dma-buf",
            remedy="use NVIDIA's open kernel modules and Linux 5.12 or newer, or nvidia-peermem",
        )
        return descriptor.value, offset

    def remote_writes_need_flush(self, device: int) -> bool:
        ordering = self._attribute(device, Attribute.GPU_DIRECT_RDMA_WRITES_ORDERING)
        return ordering < ORDERED_FOR_OWNER

    def _context(self, device: int) -> int:
        if device not in self._contexts:
            # Never released: PyTorch holds the primary context for the life of the process too.
            context = c_void_p()
            handle = self._handle(device)
            purpose = f"use GPU {device}"
            self._call("cuDevicePrimaryCtxRetain", context, handle, purpose=purpose)
            self._contexts[device] = context.value or 0
        return self._contexts[device]

    def _handle(self, device: int) -> int:
        handle = _device()
        purpose, remedy = f"find GPU {device}", "check CUDA_VISIBLE_DEVICES"
        self._call("cuDeviceGet", handle, device, purpose=purpose, remedy=remedy)
        return handle.value

    def _attribute(self, device: int, attribute: Attribute) -> int:
        value = c_int()
        purpose = f"ask GPU {device} for {attribute.name}"
        self._call("cuDeviceGetAttribute", value, attribute, self._handle(device), purpose=purpose)
        return value.value

    def _current(self) -> int:
        context = c_void_p()
        self._call("cuCtxGetCurrent", context, purpose="ask for the current context")
        return context.value or 0

    def _restore(self, current: int) -> None:
        self._call("cuCtxSetCurrent", current, purpose="make a context current")

    def _texts(self, code: int) -> tuple[str, str]:
        return self._text("cuGetErrorName", code), self._text("cuGetErrorString", code)

    def _text(self, name: str, code: int) -> str:
        text = c_char_p()
        self._functions[name](code, text)
        return (text.value or b"").decode()
