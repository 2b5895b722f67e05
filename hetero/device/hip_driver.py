"""AMD's HIP runtime (libamdhip64), as far as transports need it.

Nothing here has run on an AMD GPU yet; docs/hardware.md says what was checked and how.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from ctypes import (
    POINTER,
    c_char,
    c_char_p,
    c_int,
    c_size_t,
    c_uint,
    c_uint32,
    c_uint64,
    c_void_p,
)
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
from hetero.device.library import Function, Symbol, bind, load, loaded_path
from hetero.errors import LinkError
from hetero.native.library import HostGpu, Step, Vendor

_NAMES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5")
_HSA_NAME = "libhsa-runtime64.so"
_REMEDY = "install ROCm 5.2 or newer, or a PyTorch build that brings it along"


class IpcHandle(ctypes.Structure):
    """hipIpcMemHandle_t, which is passed by value."""

    _fields_ = (("reserved", c_char * IPC_HANDLE_BYTES),)


class Uuid(ctypes.Structure):
    """hipUUID."""

    _fields_ = (("bytes", c_char * 16),)


class Attribute(IntEnum):
    """hipDeviceAttribute_t."""

    CAN_USE_STREAM_WAIT_VALUE = 10013


INVALID_VALUE = 1
WAIT_VALUE_GTE = 0
ALL_BITS = 0xFFFFFFFF
HOST_REGISTER_FLAGS = 0x1 | 0x2
"""hipHostRegisterPortable and hipHostRegisterMapped."""
MEMCPY_DEFAULT = 4
IPC_LAZY_PEER_ACCESS = (1, 0)
"""hipIpcMemLazyEnablePeerAccess: 1 today, 0 until ROCm 5.2. Either refuses the other."""
DMA_BUF_FD = 1

SYMBOLS = (
    Symbol("hipInit", (c_uint,)),
    Symbol("hipGetErrorName", (c_int,), c_char_p),
    Symbol("hipGetErrorString", (c_int,), c_char_p),
    Symbol("hipGetLastError", ()),
    Symbol("hipGetDevice", (POINTER(c_int),)),
    Symbol("hipSetDevice", (c_int,)),
    Symbol("hipDeviceGetAttribute", (POINTER(c_int), c_int, c_int)),
    Symbol("hipDeviceGetPCIBusId", (c_char_p, c_int, c_int)),
    Symbol("hipDeviceGetUuid", (POINTER(Uuid), c_int)),
    Symbol("hipDeviceCanAccessPeer", (POINTER(c_int), c_int, c_int)),
    Symbol("hipStreamWaitValue32", (c_void_p, c_void_p, c_uint32, c_uint, c_uint32)),
    Symbol("hipStreamWriteValue32", (c_void_p, c_void_p, c_uint32, c_uint)),
    Symbol("hipMemcpyAsync", (c_void_p, c_void_p, c_size_t, c_int, c_void_p)),
    Symbol("hipEventRecord", (c_void_p, c_void_p)),
    Symbol("hipStreamWaitEvent", (c_void_p, c_void_p, c_uint)),
    Symbol("hipStreamSynchronize", (c_void_p,)),
    Symbol("hipEventSynchronize", (c_void_p,)),
    Symbol("hipHostRegister", (c_void_p, c_size_t, c_uint)),
    Symbol("hipHostUnregister", (c_void_p,)),
    Symbol("hipHostGetDevicePointer", (POINTER(c_void_p), c_void_p, c_uint)),
    Symbol("hipMalloc", (POINTER(c_void_p), c_size_t)),
    Symbol("hipFree", (c_void_p,)),
    Symbol("hipMemGetAddressRange", (POINTER(c_void_p), POINTER(c_size_t), c_void_p)),
    Symbol("hipIpcGetMemHandle", (POINTER(IpcHandle), c_void_p)),
    Symbol("hipIpcOpenMemHandle", (POINTER(c_void_p), IpcHandle, c_uint)),
    Symbol("hipIpcCloseMemHandle", (c_void_p,)),
    # ROCm 7.
    Symbol(
        "hipMemGetHandleForAddressRange",
        (c_void_p, c_void_p, c_size_t, c_int, c_uint64),
        optional=True,
    ),
)

HSA_SYMBOLS = (
    Symbol("hsa_status_string", (c_int, POINTER(c_char_p)), optional=True),
    # ROCm 5.3.
    Symbol(
        "hsa_amd_portable_export_dmabuf",
        (c_void_p, c_size_t, POINTER(c_int), POINTER(c_uint64)),
        optional=True,
    ),
)


class HipDriver(GpuDriver):
    """AMD GPUs through HIP, and HSA for dma-buf.

    A stream's wait on a value is documented only for signal memory (hipExtMallocWithFlags), which
    two processes cannot share. AMD's sources also take registered host memory, but there the
    wait is a kernel of one thread that polls and holds a hardware queue, of which streams share
    four unless GPU_MAX_HW_QUEUES says otherwise: what is enqueued later may queue up behind it.
    So it counts as usable only once `probe_stream_values` has passed.
    """

    vendor: ClassVar[str] = "amd"
    name: ClassVar[str] = "HIP"
    # HIP compares without wrapping: past the wrap it would let a stream go too early.
    end_of_counter: ClassVar[int] = 3 * 2**30
    host_words_documented: ClassVar[bool] = False
    _vendor_in_c = Vendor.HIP
    _steps: ClassVar[Mapping[Step, str]] = {
        Step.WAIT_VALUE: "hipStreamWaitValue32",
        Step.COPY: "hipMemcpyAsync",
        Step.WRITE_VALUE: "hipStreamWriteValue32",
        Step.RECORD_EVENT: "hipEventRecord",
        Step.WAIT_EVENT: "hipStreamWaitEvent",
    }

    def __init__(self, library: str | None = None) -> None:
        super().__init__()
        loaded = load([library] if library else _candidates(), remedy=_REMEDY)
        self._functions = bind(loaded, SYMBOLS, remedy=_REMEDY)
        self._functions |= _hsa_functions(loaded)
        # The three calls that are made once a chunk are not looked up by name each time.
        self._wait = self._functions["hipStreamWaitValue32"]
        self._write = self._functions["hipStreamWriteValue32"]
        self._copy = self._functions["hipMemcpyAsync"]
        self._call("hipInit", 0, purpose="start the runtime", remedy="check rocm-smi")

    def use_device(self, device: int) -> None:
        self._call(
            "hipSetDevice", device, purpose=f"use GPU {device}", remedy="check HIP_VISIBLE_DEVICES"
        )

    def host_gpu(self, device: int, stream: int) -> HostGpu:
        return self._host_gpu(
            "hipMemcpyAsync",
            "hipStreamSynchronize",
            "hipEventSynchronize",
            "hipSetDevice",
            context=device,
            stream=stream,
        )

    def stream_wait_value(self, stream: int, address: int, value: int) -> None:
        if value >= self.end_of_counter:
            raise self._past_counter(value)
        code = self._wait(stream, address, value, WAIT_VALUE_GTE, ALL_BITS)
        if code:
            purpose = f"make a stream wait for {value} at {address:#x}"
            raise self._failure("hipStreamWaitValue32", code, purpose)

    def stream_write_value(self, stream: int, address: int, value: int) -> None:
        code = self._write(stream, address, value, 0)
        if code:
            purpose = f"make a stream write {value} at {address:#x}"
            raise self._failure("hipStreamWriteValue32", code, purpose)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        code = self._copy(target, source, nbytes, MEMCPY_DEFAULT, stream)
        if code:
            purpose = f"copy {nbytes} bytes from {source:#x} to {target:#x}"
            raise self._failure("hipMemcpyAsync", code, purpose)

    def register_host(self, address: int, nbytes: int) -> None:
        self._call(
            "hipHostRegister",
            address,
            nbytes,
            HOST_REGISTER_FLAGS,
            purpose=f"pin {nbytes} bytes of host memory at {address:#x}",
            remedy=PIN_REMEDY,
        )

    def unregister_host(self, address: int) -> None:
        self._call("hipHostUnregister", address, purpose=f"unpin host memory at {address:#x}")

    def device_address(self, host_address: int) -> int:
        address = c_void_p()
        self._call(
            "hipHostGetDevicePointer",
            address,
            host_address,
            0,
            purpose=f"find host memory at {host_address:#x} from the GPU",
            remedy="register the memory first",
        )
        return address.value or 0

    def allocate(self, nbytes: int) -> int:
        address = c_void_p()
        self._call(
            "hipMalloc",
            address,
            whole_allocation(nbytes),
            purpose=f"allocate {nbytes} bytes of GPU memory",
            remedy=FREE_REMEDY,
        )
        return address.value or 0

    def free(self, address: int) -> None:
        self._call("hipFree", address, purpose=f"free GPU memory at {address:#x}")

    def ipc_handle(self, address: int) -> bytes:
        base, _ = self._range_of(address)
        if base != address:
            raise LinkError(
                f"the address {address:#x} lies {address - base} bytes within an allocation and "
                "has no IPC handle of its own; allocate it with allocate()"
            )
        handle = IpcHandle()
        self._call(
            "hipIpcGetMemHandle", handle, address, purpose=f"share GPU memory at {address:#x}"
        )
        return bytes(handle)

    def open_ipc(self, handle: bytes) -> int:
        address = c_void_p()
        structure = IpcHandle.from_buffer_copy(handle)
        code = INVALID_VALUE
        for flag in IPC_LAZY_PEER_ACCESS:
            code = self._functions["hipIpcOpenMemHandle"](address, structure, flag)
            if code != INVALID_VALUE:
                break
        self._check("hipIpcOpenMemHandle", code, "open another process's GPU memory", IPC_REMEDY)
        return address.value or 0

    def close_ipc(self, address: int) -> None:
        self._call(
            "hipIpcCloseMemHandle", address, purpose=f"close shared GPU memory at {address:#x}"
        )

    def can_access_peer(self, device: int, other: int) -> bool:
        answer = c_int()
        self._call(
            "hipDeviceCanAccessPeer",
            answer,
            device,
            other,
            purpose=f"ask whether GPU {device} reaches GPU {other}",
        )
        return bool(answer.value)

    def pci_bus_id(self, device: int) -> str:
        text = ctypes.create_string_buffer(32)
        self._call(
            "hipDeviceGetPCIBusId", text, len(text), device, purpose=f"ask where GPU {device} sits"
        )
        return text.value.decode().lower()

    def uuid(self, device: int) -> str:
        identity = Uuid()
        self._call(
            "hipDeviceGetUuid",
            identity,
            device,
            purpose=f"ask for the identity of GPU {device}",
        )
        return bytes(identity).hex()

    def can_export_dmabuf(self, device: int) -> bool:
        return (
            "hsa_amd_portable_export_dmabuf" in self._functions
            or "hipMemGetHandleForAddressRange" in self._functions
        )

    def export_dmabuf(self, address: int, nbytes: int) -> tuple[int, int]:
        purpose = f"export {nbytes} bytes of GPU memory at {address:#x} as a dma-buf"
        remedy = "use a kernel with CONFIG_PCI_P2PDMA and CONFIG_DMABUF_MOVE_NOTIFY"
        descriptor, offset = c_int(-1), c_uint64()
        if (export := self._functions.get("hsa_amd_portable_export_dmabuf")) is not None:
            code = export(address, nbytes, descriptor, offset)
            if code:
                raise LinkError(
                    f"hsa_amd_portable_export_dmabuf failed ({self._describe_hsa(code)}) to "
                    f"{purpose}; {remedy}"
                )
            return descriptor.value, offset.value
        if "hipMemGetHandleForAddressRange" not in self._functions:
            raise LinkError(f"this ROCm is too old to {purpose}; install ROCm 5.3 or newer")
        # The whole allocation: whether a part's buffer begins with the part is not documented.
        base, size = self._range_of(address)
        page = os.sysconf("SC_PAGESIZE")
        self._call(
            "hipMemGetHandleForAddressRange",
            ctypes.addressof(descriptor),
            base,
            -(-size // page) * page,
            DMA_BUF_FD,
            0,
            purpose=purpose,
            remedy=remedy,
        )
        return descriptor.value, address - base

    def remote_writes_need_flush(self, device: int) -> bool:
        # ROCm promises no order between a NIC's writes and what a kernel reads.
        return True

    def offers_stream_values(self, device: int) -> bool:
        value = c_int()
        self._call(
            "hipDeviceGetAttribute",
            value,
            Attribute.CAN_USE_STREAM_WAIT_VALUE,
            device,
            purpose=f"ask GPU {device} whether its streams wait for values",
        )
        return bool(value.value)

    def _call(self, name: str, *arguments: object, purpose: str, remedy: str = "") -> None:
        self._check(name, self._functions[name](*arguments), purpose, remedy)

    def _failure(self, call: str, code: int, purpose: str, remedy: str = "") -> LinkError:
        # HIP also keeps the error, and PyTorch would find it there and take it for its own.
        self._functions["hipGetLastError"]()
        return super()._failure(call, code, purpose, remedy)

    def _range_of(self, address: int) -> tuple[int, int]:
        base, size = c_void_p(), c_size_t()
        self._call(
            "hipMemGetAddressRange",
            base,
            size,
            address,
            purpose=f"find the allocation of GPU memory at {address:#x}",
        )
        return base.value or 0, size.value

    def _current(self) -> int:
        device = c_int()
        self._call("hipGetDevice", device, purpose="ask for the current GPU")
        return device.value

    def _restore(self, current: int) -> None:
        self.use_device(current)

    def _texts(self, code: int) -> tuple[str, str]:
        return self._text("hipGetErrorName", code), self._text("hipGetErrorString", code)

    def _text(self, name: str, code: int) -> str:
        return (self._functions[name](code) or b"").decode()

    def _describe_hsa(self, code: int) -> str:
        text = c_char_p()
        if (status_string := self._functions.get("hsa_status_string")) is not None:
            status_string(code, text)
        return (text.value or f"HSA status {code:#x}".encode()).decode()


def _candidates() -> Iterator[str]:
    """The library that PyTorch has loaded, which may be its own; else the machine's."""
    if (path := loaded_path(_NAMES[0])) is not None:
        yield path
    yield from _NAMES


def _hsa_functions(hip: ctypes.CDLL) -> dict[str, Function]:
    """The functions of HSA, which HIP is linked to or has loaded; looking there finds the same."""
    functions = bind(hip, HSA_SYMBOLS, remedy=_REMEDY)
    if not functions and (path := loaded_path(_HSA_NAME)) is not None:
        functions = bind(load([path], remedy=_REMEDY), HSA_SYMBOLS, remedy=_REMEDY)
    return functions
