"""The CPU as a device: streams that threads in C play (hetero/native/host.c)."""

from __future__ import annotations

import time
import weakref
from ctypes import CDLL

from hetero.device.base import Mark, Reached
from hetero.device.ordered import CurrentStream, NativeStreams, OrderedDevice, OrderedStream, Word
from hetero.errors import LinkError
from hetero.native.library import LIBRARY, EntryPoints, Step, Streams, Vendor

_CALLER = 1
"""HOST_CALLER of host.h."""
_END_OF_COUNTER = 2**32
_SLICE_MILLISECONDS = 100
_DONE = Reached()


class HostStreams(NativeStreams):
    """One stream, whose thread ends with this object."""

    def __init__(self, library: CDLL, wrote: tuple[int, int] | None) -> None:
        self.library = library
        self._handle = library.host_stream_create()
        if not self._handle:
            raise LinkError("no thread could be started for a link; raise the limit (ulimit -u)")
        if wrote is not None:
            library.host_stream_notify(self._handle, *wrote)
        # Not at the interpreter's exit: what works for a link then goes with the process.
        weakref.finalize(self, library.host_stream_destroy, self._handle).atexit = False
        functions = {
            Step.COPY: library.host_copy,
            Step.WAIT_VALUE: library.host_wait_value,
            Step.WRITE_VALUE: library.host_write_value,
        }
        self.streams = Streams(
            driver=EntryPoints.of(functions, vendor=Vendor.CUDA, end_of_counter=_END_OF_COUNTER),
            copies=self._handle,
            waits=self._handle,
            writes=self._handle,
        )

    def event_of(self, mark: Mark) -> int:
        return 0

    def failure(self, failed: int, purpose: str) -> LinkError:
        return LinkError(f"memory ran out in a stream of the host, to {purpose}")

    def rests_within(self, seconds: float) -> bool:
        return bool(self.library.host_stream_synchronize(self._handle, int(seconds * 1000)))


class CallingThread(CurrentStream):
    """What is given to it is done at once."""

    key = _CALLER

    def __init__(self, library: CDLL) -> None:
        self._library = library

    def wait_value(self, word: Word) -> None:
        # In slices, between which a signal is handled. A link that fails moves the word.
        while not self._library.host_wait_word(word.address, word.value, _SLICE_MILLISECONDS):
            pass

    def move(
        self, target: int, source: int, nbytes: int, *, after: Word | None, then: Word
    ) -> None:
        raise AssertionError("C gives a calling thread its work")


class HostDevice(OrderedDevice):
    """The CPU, for links whose tensors lie in its memory."""

    def __init__(self) -> None:
        self._library = LIBRARY.load()
        self._caller = CallingThread(self._library)
        self._streams: list[HostStreams] = []
        self._wrote: tuple[int, int] | None = None

    def notify(self, function: int, argument: int) -> bool:
        self._wrote = function, argument
        return True

    def use(self) -> None:
        return

    def stream(self) -> OrderedStream:
        raise AssertionError("C gives its streams work")

    def native_streams(self) -> NativeStreams:
        self._streams.append(HostStreams(self._library, self._wrote))
        return self._streams[-1]

    def current_stream(self) -> CurrentStream:
        return self._caller

    def mark(self) -> Mark:
        return _DONE

    def rests_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        return all(
            stream.rests_within(max(0.0, deadline - time.monotonic())) for stream in self._streams
        )

    def register(self, address: int, nbytes: int) -> int:
        return address

    def unregister(self, address: int) -> None:
        return

    def allocate(self, nbytes: int) -> tuple[int, bytes]:
        raise LinkError("host memory is shared by `shm`")

    def free(self, address: int) -> None:
        return

    def open(self, handle: bytes) -> int:
        raise LinkError("host memory is shared by `shm`")

    def close(self, address: int) -> None:
        return
