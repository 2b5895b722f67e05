"""A GPU as links know it whose streams order themselves."""

from __future__ import annotations

import threading
import time

import torch

from hetero.device.base import Mark, Reached
from hetero.device.driver import driver_for
from hetero.device.driver_base import GpuDriver
from hetero.device.gpu import EventMark
from hetero.device.gpu_streams import (
    GpuCurrentStream,
    GpuNativeStreams,
    StreamsOfGpu,
)
from hetero.device.ordered import CurrentStream, GpuMemory, NativeStreams, OrderedDevice
from hetero.device.probe import probe_stream_values
from hetero.native.library import native

_IDLE = Reached()
_POLL_SECONDS = 200e-6


class GpuOrderedDevice(OrderedDevice, GpuMemory):
    """An NVIDIA or AMD GPU: streams and events through PyTorch, the rest through its driver."""

    def __init__(self, device: torch.device, driver: GpuDriver | None = None) -> None:
        self._device = device
        self._driver = driver or driver_for(device)
        self._library = native()
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self._streams: list[StreamsOfGpu] = []
        self._current: dict[int, GpuCurrentStream] = {}
        self._known = threading.local()
        """Of each thread: whether it has a context, without which the driver refuses its calls."""

    def why_unordered(self) -> str | None:
        """Why this device's streams cannot wait on words of host memory; tried if in doubt."""
        if self._driver.can_wait_on_stream(self.index):
            return None
        return probe_stream_values(self._driver, self.index)

    def identity(self) -> dict[str, str]:
        """What two ends compare to see whether they can open each other's memory."""
        return {"vendor": self._driver.vendor, "uuid": self._driver.uuid(self.index)}

    def use(self) -> None:
        torch.cuda.set_device(self._device)

    def native_streams(self) -> NativeStreams:
        return GpuNativeStreams(self._new_streams(), self._driver, self._library)

    def _new_streams(self) -> StreamsOfGpu:
        streams = StreamsOfGpu(self._device)
        self._streams.append(streams)
        return streams

    def current_stream(self) -> CurrentStream:
        here = self._here()
        if not hasattr(self._known, "has_context"):
            # PyTorch's own calls give a thread its context; it may not have made one yet.
            here.is_idle()
            self._known.has_context = True
        return here

    def mark(self) -> Mark:
        stream = self._here().stream
        if stream.query():
            # Nothing to wait for, and an event costs its microseconds on both sides.
            return _IDLE
        event = torch.cuda.Event()
        event.record(stream)
        return EventMark(event, self._device)

    def rests_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        streams = [stream.is_idle for stream in self._streams]
        streams += [stream.is_idle for stream in list(self._current.values())]
        try:
            while not all(is_idle() for is_idle in streams):
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_SECONDS)
        except RuntimeError:
            # After an error of the GPU nothing runs on it.
            return True
        return True

    def _here(self) -> GpuCurrentStream:
        # Five microseconds less than torch.cuda.current_stream, which makes an object each time.
        handle: int = torch._C._cuda_getCurrentRawStream(self.index)
        found = self._current.get(handle)
        if found is None:
            stream = torch.cuda.current_stream(self._device)
            found = GpuCurrentStream(stream, self._driver)
            self._current[handle] = found
        return found

    def register(self, address: int, nbytes: int) -> int:
        with self._driver.on_device(self.index):
            self._driver.register_host(address, nbytes)
            return self._driver.device_address(address)

    def unregister(self, address: int) -> None:
        self._driver.unregister_host(address)

    def allocate(self, nbytes: int) -> tuple[int, bytes]:
        with self._driver.on_device(self.index):
            address = self._driver.allocate(nbytes)
            return address, self._driver.ipc_handle(address)

    def free(self, address: int) -> None:
        self._driver.free(address)

    def open(self, handle: bytes) -> int:
        with self._driver.on_device(self.index):
            return self._driver.open_ipc(handle)

    def close(self, address: int) -> None:
        self._driver.close_ipc(address)
