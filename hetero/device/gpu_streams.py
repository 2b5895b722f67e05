"""Streams of a GPU that wait on words and write them."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from ctypes import CDLL

import torch

from hetero.device.base import Mark
from hetero.device.driver_base import GpuDriver
from hetero.device.gpu import EventMark
from hetero.device.ordered import CurrentStream, NativeStreams, Word
from hetero.errors import LinkError
from hetero.native.library import Streams

_NOTHING: AbstractContextManager[None] = nullcontext()


class StreamsOfGpu:
    """PyTorch's streams behind a queue of work, and an event that joins them.

    A copy engine that has to stop between two copies, for a word to be waited for or written, loses
    about 6 us each time (two H200s). So waits and writes of many-part messages have two streams
    beside that of the copies. Where all streams share one hardware queue that would only hold them
    up, so there one stream does it all.
    """

    def __init__(self, device: torch.device) -> None:
        # Priority gives it a hardware queue apart from the compute streams' where there is one.
        self.copies = torch.cuda.Stream(device, priority=-1)
        shares_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        self.waits = self.copies if shares_queue else torch.cuda.Stream(device, priority=-1)
        self.writes = self.copies if shares_queue else torch.cuda.Stream(device, priority=-1)
        # Recorded and waited for at once, so one is enough. Recording makes it.
        self.joint = torch.cuda.Event()
        self.joint.record(self.copies)

    def is_idle(self) -> bool:
        return all(stream.query() for stream in (self.waits, self.copies, self.writes))


class GpuNativeStreams(NativeStreams):
    """A queue of our own, in up to three streams of the GPU."""

    def __init__(self, streams: StreamsOfGpu, driver: GpuDriver, library: CDLL) -> None:
        self._streams = streams
        self._driver = driver
        self.library = library
        self.streams = Streams(
            driver=driver.entry_points(),
            copies=streams.copies.cuda_stream,
            waits=streams.waits.cuda_stream,
            writes=streams.writes.cuda_stream,
            join=streams.joint.cuda_event,
            callers_wait=True,
        )

    def event_of(self, mark: Mark) -> int:
        return int(mark.event.cuda_event) if isinstance(mark, EventMark) else 0

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

    def is_at_home(self) -> bool:
        return bool(torch._C._cuda_getDevice() == self._index)

    def wait_value(self, word: Word) -> None:
        with self._own_device():
            self._driver.stream_wait_value(self.key, word.address, word.value)

    def _own_device(self) -> AbstractContextManager[None]:
        """The driver takes a device's default stream for that of whichever is current."""
        return _NOTHING if self.is_at_home() else self._driver.on_device(self._index)
