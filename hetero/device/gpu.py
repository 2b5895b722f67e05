"""A GPU as a device whose streams wait on words, through PyTorch and the GPU's driver."""

from __future__ import annotations

import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext

import torch

from hetero.device.device import (
    COMPLETED,
    CurrentStream,
    Device,
    DeviceStreams,
    Event,
    Word,
)
from hetero.device.driver import GpuDriver, driver_for
from hetero.device.probe import probe_stream_values
from hetero.errors import LinkError
from hetero.native.binding import Streams

_NOTHING: AbstractContextManager[None] = nullcontext()
_POLL_SECONDS = 200e-6
_LARGE_COPY_BYTES = 32 << 20
"""It takes 80 us from one H200 to another."""


def index_of(device: torch.device) -> int:
    """A GPU's index; the current one's if it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def require_no_capture() -> None:
    """Refuse stream capture: a CUDA graph would replay the transfer without the peer."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot hold what goes to or comes from a rank of another vendor; "
            "capture what comes before and after it, and leave it between the graphs"
        )


def record_event(stream: torch.cuda.Stream) -> Event:
    """Record an event on a stream."""
    event = torch.cuda.Event()
    event.record(stream)
    return Event(event.cuda_event, event)


class GpuStreams(DeviceStreams):
    """Up to three streams that act as one, and an event that joins them.

    A copy engine that waits for a word, or writes one, between two copies loses about 6 us each
    time (two H200s). So the waits and writes of messages of several chunks go to side streams.
    One stream does it all where that loss is little beside the copies, and if all streams share one
    hardware queue: what a compute stream does next waits behind any stream with which it shares a
    hardware queue, and the fewer streams there are the fewer share one.
    """

    def __init__(self, device: torch.device, driver: GpuDriver, *, copy_bytes: int) -> None:
        # A priority gives it a hardware queue apart from the compute streams', if there is one.
        copies = torch.cuda.Stream(device, priority=-1)
        has_one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        is_alone = has_one_queue or copy_bytes >= _LARGE_COPY_BYTES
        waits = copies if is_alone else torch.cuda.Stream(device, priority=-1)
        writes = copies if is_alone else torch.cuda.Stream(device, priority=-1)
        # One is enough: it is waited for right after each recording. The first creates the handle.
        self._join_event = torch.cuda.Event()
        self._join_event.record(copies)
        self._driver = driver
        self._streams = (waits, copies, writes)
        self.streams = Streams(
            driver=driver.entry_points,
            copies=copies.cuda_stream,
            waits=waits.cuda_stream,
            writes=writes.cuda_stream,
            join_event=self._join_event.cuda_event,
        )

    def is_idle(self) -> bool:
        return all(stream.query() for stream in self._streams)

    def failure(self, failed: int, purpose: str) -> LinkError:
        return self._driver.step_failure(failed, purpose)

    def broken(self) -> str | None:
        return None


class GpuCurrentStream(CurrentStream):
    """A stream of the caller's."""

    def __init__(self, stream: torch.cuda.Stream, driver: GpuDriver) -> None:
        self.key: int = stream.cuda_stream
        self.stream = stream
        self._driver = driver
        self._index = stream.device_index

    def is_idle(self) -> bool:
        return self.stream.query()

    def is_current_device(self) -> bool:
        return bool(torch._C._cuda_getDevice() == self._index)

    def wait_value(self, word: Word) -> None:
        # The handle of a default stream denotes that of the current device.
        with _NOTHING if self.is_current_device() else self._driver.on_device(self._index):
            self._driver.stream_wait_value(self.key, word.address, word.value)


class GpuDevice(Device):
    """An NVIDIA or AMD GPU."""

    def __init__(self, device: torch.device, driver: GpuDriver | None = None) -> None:
        self.device = device
        self.driver = driver or driver_for(device)
        self.index = index_of(device)
        self._streams: list[GpuStreams] = []
        self._current: dict[int, GpuCurrentStream] = {}
        self._thread_state = threading.local()
        """Whether the thread has a context, without which the driver refuses calls."""

    def stream_wait_missing(self) -> str | None:
        """Why its streams cannot wait on words of host memory, by a probe if in doubt."""
        if self.driver.host_words_documented:
            return None
        return probe_stream_values(self.driver, self.index)

    def use(self) -> None:
        torch.cuda.set_device(self.device)

    def new_streams(self, *, copy_bytes: int) -> DeviceStreams:
        self._streams.append(GpuStreams(self.device, self.driver, copy_bytes=copy_bytes))
        return self._streams[-1]

    def current_stream(self) -> CurrentStream:
        require_no_capture()
        here = self._find_current()
        if not hasattr(self._thread_state, "has_context"):
            # A call of PyTorch gives the thread its context.
            here.is_idle()
            self._thread_state.has_context = True
        return here

    def record_event(self) -> Event:
        stream = self._find_current().stream
        # An idle stream needs no event, which costs microseconds to record and to wait for.
        return COMPLETED if stream.query() else record_event(stream)

    def synchronize(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        streams = [stream.is_idle for stream in self._streams]
        streams += [stream.is_idle for stream in list(self._current.values())]
        try:
            while not all(is_idle() for is_idle in streams):
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_SECONDS)
        except RuntimeError:
            # After an error nothing runs on the GPU.
            return True
        return True

    def _find_current(self) -> GpuCurrentStream:
        # Cached: torch.cuda.current_stream makes a new object each time and costs 5 us more.
        handle: int = torch._C._cuda_getCurrentRawStream(self.index)
        found = self._current.get(handle)
        if found is None:
            stream = torch.cuda.current_stream(self.device)
            found = GpuCurrentStream(stream, self.driver)
            self._current[handle] = found
        return found

    def register(self, address: int, nbytes: int) -> int:
        with self.driver.on_device(self.index):
            self.driver.register_host(address, nbytes)
            return self.driver.device_address(address)

    def unregister(self, address: int) -> None:
        self.driver.unregister_host(address)

    def allocate(self, nbytes: int) -> tuple[int, bytes]:
        with self.driver.on_device(self.index):
            address = self.driver.allocate(nbytes)
            return address, self.driver.ipc_handle(address)

    def free(self, address: int) -> None:
        self.driver.free(address)

    def open(self, handle: bytes) -> int:
        with self.driver.on_device(self.index):
            return self.driver.open_ipc(handle)

    def close(self, address: int) -> None:
        self.driver.close_ipc(address)
