"""Device work in order, with waits on words of memory that another process's device writes.

This is what lets two GPUs hand a tensor over without a CPU thread between them: one device writes a
word when a copy has ended, the other's stream waits for the word before it copies on.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch

from hetero.device.base import Mark, Reached
from hetero.device.driver import driver_for
from hetero.device.driver_base import GpuDriver
from hetero.device.gpu import EventMark
from hetero.device.probe import probe_stream_values

_IDLE = Reached()
_POLL_SECONDS = 200e-6
_NOTHING: AbstractContextManager[None] = nullcontext()


class OrderedStream(ABC):
    """A queue of device work of our own. Nothing here blocks the calling thread.

    Addresses are the device's; a word is 32 bits of registered host memory.
    """

    @abstractmethod
    def wait_for(self, mark: Mark) -> None:
        """Go on when a mark of the caller's stream is reached."""

    @abstractmethod
    def wait_value(self, word: int, value: int, *, aside: bool = False) -> None:
        """Go on when the word is `value` or, counting round, later.

        `aside` is for one of many parts: it lets the copy before run on into the copy after.
        """

    @abstractmethod
    def write_value(self, word: int, value: int, *, aside: bool = False) -> None:
        """Write the word once everything before is done and visible; words in the order given.

        `aside` as for `wait_value`.
        """

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes, from device or registered host memory to either."""


class CurrentStream(ABC):
    """The stream in which a thread enqueues its own work. Nothing here blocks the thread."""

    key: int
    """Tells it from the device's other streams."""

    @abstractmethod
    def wait_value(self, word: int, value: int) -> None:
        """As `OrderedStream.wait_value`."""

    @abstractmethod
    def copy_and_write(
        self, target: int, source: int, nbytes: int, *, word: int, value: int
    ) -> None:
        """Copy a few bytes, and write the word once they and everything before are in place."""


class OrderedDevice(ABC):
    """What a link needs of a device whose streams can wait on words."""

    @abstractmethod
    def use(self) -> None:
        """Make the device the calling thread's; each thread calls it once."""

    @abstractmethod
    def stream(self) -> OrderedStream:
        """A new stream."""

    @abstractmethod
    def current_stream(self) -> CurrentStream:
        """The calling thread's own stream."""

    @abstractmethod
    def mark(self) -> Mark:
        """The end of what the caller has enqueued on its current stream so far."""

    @abstractmethod
    def rests_within(self, seconds: float) -> bool:
        """Wait until all work has ended in the streams given out, callers' own among them.

        False if it has not by then: what it uses must not be given back.
        """

    @abstractmethod
    def register(self, address: int, nbytes: int) -> int:
        """Pin host memory and map it for the device; returns the device's address of it."""

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo `register`. No work that uses the memory may be under way."""

    @abstractmethod
    def allocate(self, nbytes: int) -> tuple[int, bytes]:
        """Device memory, and the handle by which another process on this host can open it."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""

    @abstractmethod
    def open(self, handle: bytes) -> int:
        """Map another process's device memory for copies by this device."""

    @abstractmethod
    def close(self, address: int) -> None:
        """Undo `open`."""


class _GpuStream(OrderedStream):
    """Copies in one stream; waits and writes of many-part messages in two others.

    A copy engine that has to stop between two copies, for a word to be waited for or written, loses
    about 6 us each time (two H200s). Aside, the copies follow each other without a gap. Where all
    streams share one hardware queue that would only hold them up, so there one stream does it all.
    """

    def __init__(self, device: torch.device, driver: GpuDriver) -> None:
        # Priority gives it a hardware queue apart from the compute streams' where there is one.
        self._copies = torch.cuda.Stream(device, priority=-1)
        self._aside = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"
        self._waits = torch.cuda.Stream(device, priority=-1) if self._aside else self._copies
        self._writes = torch.cuda.Stream(device, priority=-1) if self._aside else self._copies
        self._driver = driver
        self._handle: int = self._copies.cuda_stream
        self._joint = torch.cuda.Event()
        """Recorded and waited for at once, so one is enough."""
        self._writes_lag = False
        """Whether the last write was made aside, so that one of the copies' must follow it."""

    def wait_for(self, mark: Mark) -> None:
        if isinstance(mark, EventMark):
            self._copies.wait_event(mark.event)

    def wait_value(self, word: int, value: int, *, aside: bool = False) -> None:
        if not (aside and self._aside):
            self._driver.stream_wait_value(self._handle, word, value)
            return
        self._driver.stream_wait_value(self._waits.cuda_stream, word, value)
        self._join(self._waits, self._copies)

    def write_value(self, word: int, value: int, *, aside: bool = False) -> None:
        if aside and self._aside:
            self._join(self._copies, self._writes)
            self._driver.stream_write_value(self._writes.cuda_stream, word, value)
            self._writes_lag = True
            return
        if self._writes_lag:
            self._join(self._writes, self._copies)
            self._writes_lag = False
        self._driver.stream_write_value(self._handle, word, value)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._driver.copy(target, source, nbytes, self._handle)

    def is_idle(self) -> bool:
        return all(stream.query() for stream in (self._waits, self._copies, self._writes))

    def _join(self, first: torch.cuda.Stream, then: torch.cuda.Stream) -> None:
        self._joint.record(first)
        then.wait_event(self._joint)


class _GpuCurrentStream(CurrentStream):
    def __init__(self, stream: torch.cuda.Stream, driver: GpuDriver) -> None:
        self.key = stream.cuda_stream
        self.stream = stream
        self._driver = driver
        self._index = stream.device_index

    def is_idle(self) -> bool:
        return self.stream.query()

    def wait_value(self, word: int, value: int) -> None:
        with self._own_device():
            self._driver.stream_wait_value(self.key, word, value)

    def copy_and_write(
        self, target: int, source: int, nbytes: int, *, word: int, value: int
    ) -> None:
        with self._own_device():
            if nbytes:
                self._driver.copy(target, source, nbytes, self.key)
            self._driver.stream_write_value(self.key, word, value)

    def _own_device(self) -> AbstractContextManager[None]:
        """The driver takes a device's default stream for that of whichever is current."""
        if torch.cuda.current_device() == self._index:
            return _NOTHING
        return self._driver.on_device(self._index)


class GpuOrderedDevice(OrderedDevice):
    """An NVIDIA or AMD GPU: streams and events through PyTorch, the rest through its driver."""

    def __init__(self, device: torch.device, driver: GpuDriver | None = None) -> None:
        self._device = device
        self._driver = driver or driver_for(device)
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self._streams: list[_GpuStream] = []
        self._current: dict[int, _GpuCurrentStream] = {}
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

    def stream(self) -> OrderedStream:
        stream = _GpuStream(self._device, self._driver)
        self._streams.append(stream)
        return stream

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

    def _here(self) -> _GpuCurrentStream:
        # Five microseconds less than torch.cuda.current_stream, which makes an object each time.
        handle: int = torch._C._cuda_getCurrentRawStream(self.index)
        found = self._current.get(handle)
        if found is None:
            stream = torch.cuda.current_stream(self._device)
            found = _GpuCurrentStream(stream, self._driver)
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
