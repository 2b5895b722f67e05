"""AMD's HIP runtime (libamdhip64), as far as transports need it.

Nothing here has run on an AMD GPU yet; docs/hardware.md says what was checked and how.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import ClassVar

from hetero.device.driver_base import GpuDriver, IpcHandle
from hetero.device.vendor_library import Function, Symbol, bind, calls_of, load, loaded_path
from hetero.errors import LinkError
from hetero.native.binding import Vendor

_NAMES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5")
_HSA_NAME = "libhsa-runtime64.so"
_REMEDY = "install ROCm 5.2 or newer, or a PyTorch build that brings it along"


CAN_USE_STREAM_WAIT_VALUE = 10013
"""hipDeviceAttributeCanUseStreamWaitValue."""

SYMBOLS = (
    Symbol("hipInit", (c_uint,)),
    Symbol("hipGetErrorName", (c_int,), result=c_char_p),
    Symbol("hipGetErrorString", (c_int,), result=c_char_p),
    Symbol("hipGetLastError", ()),
    Symbol("hipGetDevice", (POINTER(c_int),)),
    Symbol("hipSetDevice", (c_int,), "set_current"),
    Symbol("hipDeviceGetAttribute", (POINTER(c_int), c_int, c_int)),
    Symbol("hipDeviceGetPCIBusId", (c_char_p, c_int, c_int), "pci_bus_id"),
    Symbol("hipStreamWaitValue32", (c_void_p, c_void_p, c_uint32, c_uint, c_uint32), "wait_value"),
    Symbol("hipStreamWriteValue32", (c_void_p, c_void_p, c_uint32, c_uint), "write_value"),
    Symbol("hipMemcpyAsync", (c_void_p, c_void_p, c_size_t, c_int, c_void_p), "copy"),
    Symbol("hipEventRecord", (c_void_p, c_void_p), "record_event"),
    Symbol("hipStreamWaitEvent", (c_void_p, c_void_p, c_uint), "wait_event"),
    Symbol("hipStreamSynchronize", (c_void_p,), "synchronize_stream"),
    Symbol("hipEventSynchronize", (c_void_p,), "synchronize_event"),
    Symbol("hipHostRegister", (c_void_p, c_size_t, c_uint), "register_host"),
    Symbol("hipHostUnregister", (c_void_p,), "unregister_host"),
    Symbol("hipHostGetDevicePointer", (POINTER(c_uint64), c_void_p, c_uint), "device_address"),
    Symbol("hipMalloc", (POINTER(c_uint64), c_size_t), "allocate"),
    Symbol("hipFree", (c_void_p,), "free"),
    Symbol("hipIpcGetMemHandle", (POINTER(IpcHandle), c_void_p), "ipc_handle"),
    Symbol("hipIpcOpenMemHandle", (POINTER(c_uint64), IpcHandle, c_uint), "open_ipc"),
    Symbol("hipIpcCloseMemHandle", (c_void_p,), "close_ipc"),
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
    # HIP compares without wrapping: past the wrap it would let a stream go too early.
    counter_limit: ClassVar[int] = 3 * 2**30
    host_words_documented: ClassVar[bool] = False
    calls: ClassVar[Mapping[str, str]] = calls_of(SYMBOLS)
    _vendor_in_c = Vendor.HIP

    def __init__(self, library: str | None = None) -> None:
        loaded = load([library] if library else _candidates(), remedy=_REMEDY)
        super().__init__(bind(loaded, SYMBOLS, remedy=_REMEDY) | _hsa_functions(loaded))
        self._call("hipInit", 0, purpose="start the runtime", remedy="check rocm-smi")

    def can_export_dmabuf(self, device: int) -> bool:
        return "hsa_amd_portable_export_dmabuf" in self._functions

    def export_dmabuf(self, address: int, nbytes: int) -> tuple[int, int]:
        purpose = f"export {nbytes} bytes of GPU memory at {address:#x} as a dma-buf"
        if (export := self._functions.get("hsa_amd_portable_export_dmabuf")) is None:
            raise LinkError(f"this ROCm is too old to {purpose}; install ROCm 5.3 or newer")
        descriptor, offset = c_int(-1), c_uint64()
        if code := export(address, nbytes, descriptor, offset):
            raise LinkError(
                f"hsa_amd_portable_export_dmabuf failed ({self._describe_hsa(code)}) to {purpose}; "
                "use a kernel with CONFIG_PCI_P2PDMA and CONFIG_DMABUF_MOVE_NOTIFY"
            )
        return descriptor.value, offset.value

    def remote_writes_need_flush(self, device: int) -> bool:
        # ROCm promises no order between a NIC's writes and what a kernel reads.
        return True

    def offers_stream_values(self, device: int) -> bool:
        value = c_int()
        self._call(
            "hipDeviceGetAttribute",
            value,
            CAN_USE_STREAM_WAIT_VALUE,
            device,
            purpose=f"ask GPU {device} whether its streams wait for values",
        )
        return bool(value.value)

    def _failure(self, call: str, code: int, purpose: str, remedy: str = "") -> LinkError:
        # HIP also keeps the error, and PyTorch would find it there and take it for its own.
        self._functions["hipGetLastError"]()
        return super()._failure(call, code, purpose, remedy)

    def _context(self, device: int) -> int:
        return device

    def _current(self) -> int:
        device = c_int()
        self._call("hipGetDevice", device, purpose="ask for the current GPU")
        return device.value

    def _restore(self, current: int) -> None:
        purpose, remedy = f"use GPU {current}", "check HIP_VISIBLE_DEVICES"
        self._call("hipSetDevice", current, purpose=purpose, remedy=remedy)

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
