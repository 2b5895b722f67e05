"""A CPU that plays a GPU whose streams wait on words: one thread a stream, copies by memmove.

It lets the link between two GPUs run its whole protocol where there is no GPU. Device memory is a
memfd of the process, and its handle says where another process finds it. *Emulated*: it says
nothing of how a real GPU behaves.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable

from hetero.device.base import Mark, Reached
from hetero.device.ordered import CurrentStream, OrderedDevice, OrderedStream

_POLL_SECONDS = 50e-6


class _EmulatedStream(OrderedStream):
    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._work.put(self._end)
        if self._thread is not None:
            self._thread.join()

    def wait_for(self, mark: Mark) -> None:
        self._work.put(mark.synchronize)

    def wait_value(self, word: int, value: int, *, aside: bool = False) -> None:
        self._work.put(lambda: _wait_value(word, value))

    def write_value(self, word: int, value: int, *, aside: bool = False) -> None:
        def write() -> None:
            ctypes.c_uint32.from_address(word).value = value

        self._work.put(write)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._work.put(lambda: ctypes.memmove(target, source, nbytes) and None)

    def rests_within(self, seconds: float) -> bool:
        reached = threading.Event()
        self._work.put(reached.set)
        return reached.wait(seconds)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if work == self._end:
                return
            work()

    def _end(self) -> None:
        """Ends the thread when it is met."""


def _wait_value(word: int, value: int) -> None:
    here = ctypes.c_uint32.from_address(word)
    while ((here.value - value + 0x80000000) & 0xFFFFFFFF) < 0x80000000:
        time.sleep(_POLL_SECONDS)


class _CallersThread(CurrentStream):
    """A thread of a CPU is its own stream: what it enqueues is done at once."""

    def __init__(self) -> None:
        self.key = threading.get_ident()

    def wait_value(self, word: int, value: int) -> None:
        _wait_value(word, value)

    def copy_and_write(
        self, target: int, source: int, nbytes: int, *, word: int, value: int
    ) -> None:
        ctypes.memmove(target, source, nbytes)
        ctypes.c_uint32.from_address(word).value = value


class EmulatedOrderedDevice(OrderedDevice):
    """Streams of a device that is the CPU."""

    def __init__(self) -> None:
        self._streams: list[_EmulatedStream] = []
        self._memory: dict[int, tuple[mmap.mmap, int]] = {}

    def use(self) -> None:
        return

    def stream(self) -> OrderedStream:
        stream = _EmulatedStream()
        stream.start()
        self._streams.append(stream)
        return stream

    def current_stream(self) -> CurrentStream:
        return _CallersThread()

    def mark(self) -> Mark:
        return Reached()

    def rests_within(self, seconds: float) -> bool:
        return all(stream.rests_within(seconds) for stream in self._streams)

    def register(self, address: int, nbytes: int) -> int:
        return address

    def unregister(self, address: int) -> None:
        # The first thing that a closing link does after its streams have come to rest.
        while self._streams:
            self._streams.pop().stop()

    def allocate(self, nbytes: int) -> tuple[int, bytes]:
        descriptor = os.memfd_create("emulated-device-memory", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        return self._map(descriptor, nbytes), f"{os.getpid()} {descriptor} {nbytes}".encode()

    def open(self, handle: bytes) -> int:
        process, number, nbytes = map(int, handle.split())
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        return self._map(descriptor, nbytes)

    def free(self, address: int) -> None:
        memory, descriptor = self._memory.pop(address)
        memory.close()
        os.close(descriptor)

    def close(self, address: int) -> None:
        self.free(address)

    def _map(self, descriptor: int, nbytes: int) -> int:
        memory = mmap.mmap(descriptor, nbytes)
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view)
        del view
        self._memory[address] = (memory, descriptor)
        return address
