"""The calls of a GPU vendor's driver that PyTorch does not expose.

Addresses, streams and devices are ints: `Tensor.data_ptr()`, `torch.cuda.Stream.cuda_stream`, and a
device's index in this process.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import byref, c_char, c_uint64, c_void_p, cast
from functools import cached_property
from typing import Any, ClassVar

from hetero.device.vendor_library import Function
from hetero.errors import LinkError
from hetero.native.binding import EntryPoints, HostGpu, Step, native

IPC_HANDLE_BYTES = 64
ALLOCATION_BYTES = 2 * 2**20
"""Allocations are multiples of this, so that no two share a page of the GPU."""

INVALID_CONTEXT = 201
LAZY_PEER_ACCESS = 0x1
"""The flag for opening an IPC handle. These numbers are the same in CUDA and HIP."""
HOST_REGISTER_FLAGS = 0x1 | 0x2
"""Portable and mapped."""

PIN_REMEDY = "raise the locked-memory limit (ulimit -l) or make the ring smaller"
FREE_REMEDY = "free memory of the device, or make the ring smaller"
IPC_REMEDY = (
    "both processes must run on one host and see both GPUs, and a process cannot open a handle "
    "of its own"
)


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle and hipIpcMemHandle_t; passed by value."""

    _fields_ = (("data", c_char * IPC_HANDLE_BYTES),)


class GpuDriver(ABC):
    """The common interface of the vendors' drivers.

    Streams, allocations and handles belong to the calling thread's current device. A thread that
    has not set one (`torch.cuda.set_device` does) calls `use_device` once before anything else.
    Every call that fails raises LinkError with the call, the library's own name of the error, and
    a remedy where one is known. The calls that take a stream return at once.
    """

    vendor: ClassVar[str]
    counter_limit: ClassVar[int] = 2**32
    """The first value that streams cannot wait for; 2**32 where counters may wrap."""
    host_words_documented: ClassVar[bool]
    """Whether the vendor documents that a stream may wait on registered host memory."""
    calls: ClassVar[Mapping[str, str]]
    """Our alias -> the library's name, for functions with the same arguments at both vendors."""
    _vendor_in_c: ClassVar[Any]
    """Of `binding.Vendor`."""

    def __init__(self, functions: dict[str, Function]) -> None:
        self._functions = functions

    def use_device(self, device: int) -> None:
        """Make a device the calling thread's current one, as `torch.cuda.set_device` does."""
        self._restore(self._context(device))

    @contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        """Make a device current within a block."""
        before = self._current()
        self.use_device(device)
        try:
            yield
        finally:
            self._restore(before)

    @cached_property
    def entry_points(self) -> Any:
        """`struct entry_points`: addresses of the functions that C calls."""
        names = [name for name, _ in EntryPoints._fields_ if name in self.calls]
        pointers: dict[str, Any] = {name: self._functions[self.calls[name]] for name in names}
        addresses = {name: cast(pointer, c_void_p).value for name, pointer in pointers.items()}
        return EntryPoints(self._vendor_in_c, self.counter_limit, **addresses)

    def step_failure(self, failed: int, purpose: str) -> LinkError:
        """The error for a `failure` of streams.h."""
        step, code = Step(failed >> 32), failed & 0xFFFFFFFF
        if step is Step.COUNTER_LIMIT:
            return LinkError(
                f"a counter of chunks has come to {code}, which {self._vendor_in_c.name} cannot "
                "wait for; close the link and open it again"
            )
        call = self.calls[step.name.lower()]
        return self._failure(call, ctypes.c_int32(code).value, purpose)

    def host_gpu(self, device: int, stream: int) -> Any:
        """For a stream of the host that copies to and from a device, on a stream of the device."""
        return HostGpu(self.entry_points, self._context(device), stream)

    def stream_wait_value(self, stream: int, address: int, value: int) -> None:
        """Make a stream wait until the 32-bit word at `address` is at least `value`.

        `address` is a `device_address` of registered host memory. A value of `counter_limit` or
        more is refused.
        """
        failed = native().native_wait_value(byref(self.entry_points), stream, address, value)
        if failed:
            raise self.step_failure(failed, f"make a stream wait for {value} at {address:#x}")

    def stream_write_value(self, stream: int, address: int, value: int) -> None:
        """Write a 32-bit word once everything before it on the stream is done and visible."""
        failed = native().native_write_value(byref(self.entry_points), stream, address, value)
        if failed:
            raise self.step_failure(failed, f"make a stream write {value} at {address:#x}")

    def register_host(self, address: int, nbytes: int) -> None:
        """Pin host memory for all devices of the process, and map it for them."""
        purpose = f"pin {nbytes} bytes of host memory at {address:#x}"
        arguments = (address, nbytes, HOST_REGISTER_FLAGS)
        self._call("register_host", *arguments, purpose=purpose, remedy=PIN_REMEDY)

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`, given the same address."""
        self._call("unregister_host", address, purpose=f"unpin host memory at {address:#x}")

    def device_address(self, host_address: int) -> int:
        """The current device's address of registered host memory."""
        address = c_uint64()
        purpose = f"find host memory at {host_address:#x} from the GPU"
        remedy = "register the memory first"
        self._call("device_address", address, host_address, 0, purpose=purpose, remedy=remedy)
        return address.value

    def allocate(self, nbytes: int) -> int:
        """Memory of the current device, outside PyTorch's cache.

        It is rounded up to whole multiples of `ALLOCATION_BYTES`: IPC handles and memory
        registration are for whole allocations, and PyTorch's are parts of larger ones.
        """
        address = c_uint64()
        purpose = f"allocate {nbytes} bytes of GPU memory"
        size = whole_allocation(nbytes)
        self._call("allocate", address, size, purpose=purpose, remedy=FREE_REMEDY)
        return address.value

    def free(self, address: int) -> None:
        """Free memory of `allocate`. May wait for the device's work to end."""
        self._call("free", address, purpose=f"free GPU memory at {address:#x}")

    def ipc_handle(self, address: int) -> bytes:
        """The IPC handle of memory of `allocate`."""
        handle = IpcHandle()
        self._call("ipc_handle", handle, address, purpose=f"share GPU memory at {address:#x}")
        return bytes(handle)

    def open_ipc(self, handle: bytes) -> int:
        """Map another process's allocation on the current device, with direct access to it.

        The current device must be the one that copies. Opened on the owner's device, copies to
        another one are staged by the driver, without an error, at a tenth of the speed.
        """
        address = c_uint64()
        arguments = (address, IpcHandle.from_buffer_copy(handle), LAZY_PEER_ACCESS)
        purpose = "open another process's GPU memory"
        self._call("open_ipc", *arguments, purpose=purpose, remedy=IPC_REMEDY)
        return address.value

    def close_ipc(self, address: int) -> None:
        """Undo `open_ipc`."""
        self._call("close_ipc", address, purpose=f"close shared GPU memory at {address:#x}")

    def pci_bus_id(self, device: int) -> str:
        """A device's PCI address, such as `0000:5d:00.0`; equal in all processes."""
        text = ctypes.create_string_buffer(32)
        purpose = f"ask where GPU {device} sits"
        self._call("pci_bus_id", text, len(text), self._handle(device), purpose=purpose)
        return text.value.decode().lower()

    @abstractmethod
    def can_export_dmabuf(self, device: int) -> bool:
        """Whether `export_dmabuf` may be tried."""

    @abstractmethod
    def export_dmabuf(self, address: int, nbytes: int) -> tuple[int, int]:
        """A dma-buf of device memory: a file descriptor, which the caller closes, and an offset.

        `address` is at `offset` in the buffer.
        """

    @abstractmethod
    def remote_writes_need_flush(self, device: int) -> bool:
        """Whether a NIC's completed writes may not be visible to the device yet.

        If so, the NIC has to read back: on the bus a read does not pass earlier writes, so once it
        has completed they are visible.
        """

    def offers_stream_values(self, device: int) -> bool:
        """Whether the device has `stream_wait_value` and `stream_write_value` at all."""
        return True

    @abstractmethod
    def _current(self) -> int:
        """The current context, for `_restore`."""

    @abstractmethod
    def _restore(self, current: int) -> None:
        """Make a context current."""

    @abstractmethod
    def _context(self, device: int) -> int:
        """A device's context, for `_restore`: in HIP the device's number."""

    @abstractmethod
    def _texts(self, code: int) -> tuple[str, str]:
        """The library's name and description of an error; empty if it has none."""

    def _handle(self, device: int) -> int:
        """The library's handle of a device."""
        return device

    def _call(self, name: str, *arguments: object, purpose: str, remedy: str = "") -> None:
        """Call a function by its alias or, if it has none, by the library's name."""
        call = self.calls.get(name, name)
        code = self._functions[call](*arguments)
        if code:
            raise self._failure(call, code, purpose, remedy)

    def _failure(self, call: str, code: int, purpose: str, remedy: str = "") -> LinkError:
        if code == INVALID_CONTEXT:
            remedy = "call use_device() in this thread first"
        name, words = self._texts(code)
        said = ": ".join(dict.fromkeys(text for text in (name, words) if text))
        advice = f"; {remedy}" if remedy else ""
        return LinkError(f"{call} failed ({said or f'error {code}'}) to {purpose}{advice}")


def whole_allocation(nbytes: int) -> int:
    """`nbytes` rounded up to multiples of `ALLOCATION_BYTES`, at least one."""
    return max(1, -(-nbytes // ALLOCATION_BYTES)) * ALLOCATION_BYTES
