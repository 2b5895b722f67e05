"""The host as a device, whose streams threads in C execute (hetero/native/host.c).

For tensors in host memory, for tensors of a GPU whose streams cannot wait on memory, and for every
link with checksums, which only a CPU computes.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from ctypes import CDLL, byref
from typing import Any

import torch

from hetero.device.device import COMPLETED, CurrentStream, Device, DeviceStreams, Event, Word
from hetero.device.gpu import GpuDevice, require_no_capture
from hetero.errors import LinkError
from hetero.native.binding import (
    CHECKSUM_BYTES,
    SPIN_MICROSECONDS,
    EntryPoints,
    HostFailure,
    Streams,
    Vendor,
    native,
    proxy,
)

_CALLER, _ELSEWHERE = 1, 0
"""HOST_CALLING_THREAD of host.h, and a stream that C cannot use."""
_SLICE_MILLISECONDS = 100


class HostStreams(DeviceStreams):
    """One stream, which ends with this object."""

    def __init__(
        self,
        library: CDLL,
        *,
        gpu: GpuDevice | None = None,
        on_write: tuple[Any, int | None] = (None, None),
    ) -> None:
        """`on_write` is a function in C, and its argument, to call after each word written."""
        self._library = library
        # A stream of torch, which keeps memory that it uses from being reused during a copy.
        self._stream = None if gpu is None else torch.cuda.Stream(gpu.device, priority=-1)
        request = None
        if gpu is not None and self._stream is not None:
            request = byref(gpu.driver.host_gpu(gpu.index, self._stream.cuda_stream))
        self._handle = library.host_stream_create(proxy(), request, *on_write)
        if not self._handle:
            raise LinkError("no thread could be started for a link; raise the limit (ulimit -u)")
        # Not at the interpreter's exit: links still in use end with the process.
        weakref.finalize(self, library.host_stream_destroy, self._handle).atexit = False
        enqueue = ctypes.cast(library.host_enqueue, ctypes.c_void_p).value
        self.streams = Streams(
            driver=EntryPoints(vendor=Vendor.HOST, copy=enqueue),
            copies=self._handle,
        )

    def failure(self, failed: int, purpose: str) -> LinkError:
        if failed & 0xFFFFFFFF == HostFailure.WRONG_CHECKSUM:
            return LinkError("a wrong checksum in its bytes")
        return LinkError(f"memory ran out in a stream of the host, to {purpose}")

    def broken(self) -> str | None:
        failure = HostFailure(self._library.host_stream_failure(self._handle))
        if failure is HostFailure.WRONG_CHECKSUM:
            return "a message has a wrong checksum in its bytes"
        if failure is HostFailure.GPU_FAILED:
            return "the GPU's driver refused a copy or a wait"
        return None

    def synchronize(self, seconds: float) -> bool:
        return bool(self._library.host_stream_synchronize(self._handle, int(seconds * 1000)))


class CallingThread(CurrentStream):
    """The calling thread as a stream: its work is complete when the call returns."""

    def __init__(self, library: CDLL, *, accepts_work: bool) -> None:
        self.key = _CALLER if accepts_work else _ELSEWHERE
        self._accepts_work = accepts_work
        self._library = library

    def is_current_device(self) -> bool:
        return self._accepts_work

    def wait_value(self, word: Word) -> None:
        # In slices, so that signals are handled in between. A link that fails unblocks the word.
        wait = self._library.host_wait_word
        while not wait(word.address, word.value, SPIN_MICROSECONDS, _SLICE_MILLISECONDS):
            pass


class HostDevice(Device):
    """The host as the device of a link.

    Args:
        device: where the tensors are: the CPU or a GPU.
        checksum: append one to each entry and verify it at the other end.
    """

    notifies = True

    def __init__(self, device: torch.device, *, checksum: bool = False) -> None:
        self._library = native()
        self._gpu = None if device.type == "cpu" else GpuDevice(device)
        self._caller = CallingThread(self._library, accepts_work=self._gpu is None)
        self._streams: list[HostStreams] = []
        self._on_write: tuple[Any, int | None] = (None, None)
        self.checksum_bytes = CHECKSUM_BYTES if checksum else 0
        self.has_host_tensors = self._gpu is None

    def notify(self, function: Any, argument: int | None) -> None:
        self._on_write = function, argument

    def use(self) -> None:
        if self._gpu is not None:
            self._gpu.use()

    def new_streams(self, *, copy_bytes: int) -> DeviceStreams:
        self._streams.append(HostStreams(self._library, gpu=self._gpu, on_write=self._on_write))
        return self._streams[-1]

    def current_stream(self) -> CurrentStream:
        return self._caller

    def record_event(self) -> Event:
        if self._gpu is None:
            return COMPLETED
        require_no_capture()
        return self._gpu.record_event()

    def synchronize(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        return all(
            stream.synchronize(max(0.0, deadline - time.monotonic())) for stream in self._streams
        )

    def register(self, address: int, nbytes: int) -> int:
        if self._gpu is not None:
            self._gpu.register(address, nbytes)
        return address

    def unregister(self, address: int) -> None:
        if self._gpu is not None:
            self._gpu.unregister(address)
