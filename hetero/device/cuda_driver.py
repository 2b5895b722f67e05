"""NVIDIA's driver API (libcuda), as far as transports need it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from typing import ClassVar

from hetero.device.driver_base import (
    FREE_REMEDY,
    IPC_HANDLE_BYTES,
    IPC_REMEDY,
    PIN_REMEDY,
    GpuDriver,
    whole_allocation,
)
from hetero.device.library import Symbol, bind, load
from hetero.errors import LinkError
from hetero.native.library import HostGpu, Step, Vendor

LIBRARY = "libcuda.so.1"
_REMEDY = "install NVIDIA's driver, 515 or newer"


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("data", c_char * IPC_HANDLE_BYTES),)


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("data", c_char * 16),)


class Attribute(IntEnum):
    """CUdevice_attribute."""

    GPU_DIRECT_RDMA_WRITES_ORDERING = 118
    DMA_BUF_SUPPORTED = 124


WAIT_VALUE_GEQ = 0
WRITE_VALUE_DEFAULT = 0
HOST_REGISTER_FLAGS = 0x1 | 0x2
"""CU_MEMHOSTREGISTER_PORTABLE and CU_MEMHOSTREGISTER_DEVICEMAP."""
IPC_LAZY_PEER_ACCESS = 0x1
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
    Symbol("cuDeviceGetPCIBusId", (c_char_p, c_int, _device)),
    Symbol("cuDeviceGetUuid_v2", (POINTER(Uuid), _device)),
    Symbol("cuDeviceCanAccessPeer", (POINTER(c_int), _device, _device)),
    Symbol("cuDevicePrimaryCtxRetain", (POINTER(_context), _device)),
    Symbol("cuCtxGetCurrent", (POINTER(_context),)),
    Symbol("cuCtxSetCurrent", (_context,)),
    Symbol("cuStreamWaitValue32_v2", (_stream, _address, c_uint32, c_uint)),
    Symbol("cuStreamWriteValue32_v2", (_stream, _address, c_uint32, c_uint)),
    Symbol("cuMemcpyAsync", (_address, _address, c_size_t, _stream)),
    Symbol("cuEventRecord", (_event, _stream)),
    Symbol("cuStreamWaitEvent", (_stream, _event, c_uint)),
    Symbol("cuStreamSynchronize", (_stream,)),
    Symbol("cuEventSynchronize", (_event,)),
    Symbol("cuMemHostRegister_v2", (c_void_p, c_size_t, c_uint)),
    Symbol("cuMemHostUnregister", (c_void_p,)),
    Symbol("cuMemHostGetDevicePointer_v2", (POINTER(_address), c_void_p, c_uint)),
    Symbol("cuMemAlloc_v2", (POINTER(_address), c_size_t)),
    Symbol("cuMemFree_v2", (_address,)),
    Symbol("cuMemGetAddressRange_v2", (POINTER(_address), POINTER(c_size_t), _address)),
    Symbol("cuIpcGetMemHandle", (POINTER(IpcHandle), _address)),
    Symbol("cuIpcOpenMemHandle_v2", (POINTER(_address), IpcHandle, c_uint)),
    Symbol("cuIpcCloseMemHandle", (_address,)),
    Symbol("cuMemGetHandleForAddressRange", (c_void_p, _address, c_size_t, c_int, c_uint64)),
)


class CudaDriver(GpuDriver):
    """NVIDIA GPUs through libcuda."""

    vendor: ClassVar[str] = "nvidia"
    name: ClassVar[str] = "CUDA"
    host_words_documented: ClassVar[bool] = True
    _vendor_in_c = Vendor.CUDA
    _steps: ClassVar[Mapping[Step, str]] = {
        Step.WAIT_VALUE: "cuStreamWaitValue32_v2",
        Step.COPY: "cuMemcpyAsync",
        Step.WRITE_VALUE: "cuStreamWriteValue32_v2",
        Step.RECORD_EVENT: "cuEventRecord",
        Step.WAIT_EVENT: "cuStreamWaitEvent",
    }

    def __init__(self, library: str = LIBRARY) -> None:
        super().__init__()
        self._functions = bind(load([library], remedy=_REMEDY), SYMBOLS, remedy=_REMEDY)
        # The three calls that are made once a chunk are not looked up by name each time.
        self._wait = self._functions["cuStreamWaitValue32_v2"]
        self._write = self._functions["cuStreamWriteValue32_v2"]
        self._copy = self._functions["cuMemcpyAsync"]
        self._contexts: dict[int, int] = {}
        self._call("cuInit", 0, purpose="start the driver", remedy="check nvidia-smi")

    def use_device(self, device: int) -> None:
        if device not in self._contexts:
            # Never released: PyTorch holds the primary context for the life of the process too.
            context = c_void_p()
            self._call(
                "cuDevicePrimaryCtxRetain",
                context,
                self._handle(device),
                purpose=f"use GPU {device}",
            )
            self._contexts[device] = context.value or 0
        self._restore(self._contexts[device])

    def host_gpu(self, device: int, stream: int) -> HostGpu:
        with self.on_device(device):
            context = self._contexts[device]
        return self._host_gpu(
            "cuMemcpyAsync",
            "cuStreamSynchronize",
            "cuEventSynchronize",
            "cuCtxSetCurrent",
            context=context,
            stream=stream,
        )

    def stream_wait_value(self, stream: int, address: int, value: int) -> None:
        code = self._wait(stream, address, value, WAIT_VALUE_GEQ)
        if code:
            purpose = f"make a stream wait for {value} at {address:#x}"
            raise self._failure("cuStreamWaitValue32_v2", code, purpose)

    def stream_write_value(self, stream: int, address: int, value: int) -> None:
        code = self._write(stream, address, value, WRITE_VALUE_DEFAULT)
        if code:
            purpose = f"make a stream write {value} at {address:#x}"
            raise self._failure("cuStreamWriteValue32_v2", code, purpose)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        code = self._copy(target, source, nbytes, stream)
        if code:
            purpose = f"copy {nbytes} bytes from {source:#x} to {target:#x}"
            raise self._failure("cuMemcpyAsync", code, purpose)

    def register_host(self, address: int, nbytes: int) -> None:
        self._call(
            "cuMemHostRegister_v2",
            address,
            nbytes,
            HOST_REGISTER_FLAGS,
            purpose=f"pin {nbytes} bytes of host memory at {address:#x}",
            remedy=PIN_REMEDY,
        )

    def unregister_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", address, purpose=f"unpin host memory at {address:#x}")

    def device_address(self, host_address: int) -> int:
        address = _address()
        self._call(
            "cuMemHostGetDevicePointer_v2",
            address,
            host_address,
            0,
            purpose=f"find host memory at {host_address:#x} from the GPU",
            remedy="register the memory first",
        )
        return address.value

    def allocate(self, nbytes: int) -> int:
        address = _address()
        self._call(
            "cuMemAlloc_v2",
            address,
            whole_allocation(nbytes),
            purpose=f"allocate {nbytes} bytes of GPU memory",
            remedy=FREE_REMEDY,
        )
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address, purpose=f"free GPU memory at {address:#x}")

    def ipc_handle(self, address: int) -> bytes:
        base, _ = self._range_of(address)
        if base != address:
            raise LinkError(
                f"the address {address:#x} lies {address - base} bytes within an allocation and "
                "has no IPC handle of its own; allocate it with allocate()"
            )
        handle = IpcHandle()
        self._call(
            "cuIpcGetMemHandle", handle, address, purpose=f"share GPU memory at {address:#x}"
        )
        return bytes(handle)

    def open_ipc(self, handle: bytes) -> int:
        address = _address()
        self._call(
            "cuIpcOpenMemHandle_v2",
            address,
            IpcHandle.from_buffer_copy(handle),
            IPC_LAZY_PEER_ACCESS,
            purpose="open another process's GPU memory",
            remedy=IPC_REMEDY,
        )
        return address.value

    def close_ipc(self, address: int) -> None:
        self._call(
            "cuIpcCloseMemHandle", address, purpose=f"close shared GPU memory at {address:#x}"
        )

    def can_access_peer(self, device: int, other: int) -> bool:
        answer = c_int()
        self._call(
            "cuDeviceCanAccessPeer",
            answer,
            self._handle(device),
            self._handle(other),
            purpose=f"ask whether GPU {device} reaches GPU {other}",
        )
        return bool(answer.value)

    def pci_bus_id(self, device: int) -> str:
        text = ctypes.create_string_buffer(32)
        self._call(
            "cuDeviceGetPCIBusId",
            text,
            len(text),
            self._handle(device),
            purpose=f"ask where GPU {device} sits",
        )
        return text.value.decode().lower()

    def uuid(self, device: int) -> str:
        identity = Uuid()
        self._call(
            "cuDeviceGetUuid_v2",
            identity,
            self._handle(device),
            purpose=f"ask for the identity of GPU {device}",
        )
        return bytes(identity).hex()

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

    def offers_stream_values(self, device: int) -> bool:
        # Every GPU of a driver that has the second version of the calls, which is required.
        return True

    def _call(self, name: str, *arguments: object, purpose: str, remedy: str = "") -> None:
        self._check(name, self._functions[name](*arguments), purpose, remedy)

    def _handle(self, device: int) -> int:
        handle = _device()
        self._call(
            "cuDeviceGet",
            handle,
            device,
            purpose=f"find GPU {device}",
            remedy="check CUDA_VISIBLE_DEVICES",
        )
        return handle.value

    def _attribute(self, device: int, attribute: Attribute) -> int:
        value = c_int()
        self._call(
            "cuDeviceGetAttribute",
            value,
            attribute,
            self._handle(device),
            purpose=f"ask GPU {device} for {attribute.name}",
        )
        return value.value

    def _range_of(self, address: int) -> tuple[int, int]:
        base, size = _address(), c_size_t()
        self._call(
            "cuMemGetAddressRange_v2",
            base,
            size,
            address,
            purpose=f"find the allocation of GPU memory at {address:#x}",
        )
        return base.value, size.value

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
