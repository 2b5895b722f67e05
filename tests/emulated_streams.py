"""A CPU that plays a GPU whose streams wait on words: one thread a stream, copies by memmove.

It lets the link between two GPUs run its whole protocol where there is no GPU. What of that is in C
takes callbacks for a driver's functions. Device memory is a memfd of the process, and its handle
says where another process finds it. *Emulated*: it says nothing of how a real GPU behaves.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any, Protocol

from hetero.device.device import (
    COMPLETED,
    CurrentStream,
    Device,
    DeviceStreams,
    Event,
    Word,
)
from hetero.errors import LinkError
from hetero.native.binding import EntryPoints, Step, Streams, Vendor

_POLL_SECONDS = 50e-6
ANY_VALUE = 2**32
_FUNCTIONS = {
    Step.COPY: CFUNCTYPE(c_int, c_uint64, c_uint64, c_size_t, c_void_p),
    Step.WAIT_VALUE: CFUNCTYPE(c_int, c_void_p, c_uint64, c_uint32, c_uint),
    Step.WRITE_VALUE: CFUNCTYPE(c_int, c_void_p, c_uint64, c_uint32, c_uint),
    Step.RECORD_EVENT: CFUNCTYPE(c_int, c_void_p, c_void_p),
    Step.WAIT_EVENT: CFUNCTYPE(c_int, c_void_p, c_void_p, c_uint),
}


class _Queue:
    """Work done in order by a thread of its own."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def stop(self) -> None:
        self._work.put(self._end)
        self._thread.join()

    def synchronize(self, seconds: float) -> bool:
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


class _Awaitable(Protocol):
    """What a stream may be made to wait for."""

    def wait(self) -> object: ...


class _DriverForC:
    """What C calls in the place of a GPU's driver.

    A handle that is no queue's is the caller's stream. `before` is called with each step, and fails
    it with the code that it returns.
    """

    def __init__(self) -> None:
        self.before: Callable[[Step], int] = lambda step: 0
        self.copied_by_callers = 0
        self._queues: dict[int, _Queue] = {}
        self._events: dict[int, _Awaitable] = {}
        self._functions = {
            Step.COPY: self._copy,
            Step.WAIT_VALUE: lambda stream, word, value, flags: self._give(
                stream, lambda: _wait_value(Word(word, value))
            ),
            Step.WRITE_VALUE: lambda stream, word, value, flags: self._give(
                stream, lambda: _write_value(Word(word, value))
            ),
            Step.RECORD_EVENT: self._record,
            Step.WAIT_EVENT: lambda stream, event, flags: self._give(
                stream, self._events[event].wait
            ),
        }
        # C keeps their addresses alone.
        self._callbacks = {step: _FUNCTIONS[step](self._called(step)) for step in _FUNCTIONS}

    def entry_points(self) -> Any:
        addresses = {
            step.name.lower(): ctypes.cast(callback, c_void_p).value
            for step, callback in self._callbacks.items()
        }
        return EntryPoints(Vendor.CUDA, ANY_VALUE, **addresses)

    def know_queue(self, work: _Queue) -> int:
        return self._handle(self._queues, work)

    def know_event(self, event: _Awaitable) -> Event:
        return Event(self._handle(self._events, event), event)

    def _handle(self, known: dict[int, Any], what: object) -> int:
        # No thread has such a number, which a caller's stream goes by.
        handle = 8 * (len(known) + 1)
        known[handle] = what
        return handle

    def _called(self, step: Step) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            return self.before(step) or self._functions[step](*arguments)

        return call

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        self.copied_by_callers += stream not in self._queues
        return self._give(stream, lambda: _copy(target, source, nbytes))

    def _give(self, stream: int, work: Callable[[], None]) -> int:
        if stream in self._queues:
            self._queues[stream].put(work)
        else:
            work()
        return 0

    def _record(self, event: int, stream: int) -> int:
        self._events[event] = recorded = threading.Event()
        return self._give(stream, recorded.set)


class _StreamsForC(DeviceStreams):
    def __init__(self, driver: _DriverForC, queues: list[_Queue]) -> None:
        copies, waits, writes = (driver.know_queue(work) for work in queues)
        self.streams = Streams(
            driver=driver.entry_points(),
            copies=copies,
            waits=waits,
            writes=writes,
            join_event=driver.know_event(threading.Event()).handle,
        )

    def failure(self, failed: int, purpose: str) -> LinkError:
        return LinkError(f"{Step(failed >> 32).name} failed ({failed & 0xFFFFFFFF}) to {purpose}")


def _wait_value(word: Word) -> None:
    here = c_uint32.from_address(word.address)
    while ((here.value - word.value + 0x80000000) & 0xFFFFFFFF) < 0x80000000:
        time.sleep(_POLL_SECONDS)


def _write_value(word: Word) -> None:
    c_uint32.from_address(word.address).value = word.value


def _copy(target: int, source: int, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)


class CallersThread(CurrentStream):
    """A thread of a CPU is its own stream: what it enqueues is done at once."""

    def __init__(self) -> None:
        self.key = threading.get_ident()

    def wait_value(self, word: Word) -> None:
        _wait_value(word)


class EmulatedDevice(Device):
    """Streams of a device that is the CPU."""

    def __init__(self) -> None:
        self._queues: list[_Queue] = []
        self._memory: dict[int, tuple[mmap.mmap, int]] = {}
        self.driver_for_c = _DriverForC()

    def use(self) -> None:
        return

    def new_streams(self, *, copy_bytes: int) -> DeviceStreams:
        return _StreamsForC(self.driver_for_c, [self._new_queue() for _ in range(3)])

    def _new_queue(self) -> _Queue:
        made = _Queue()
        self._queues.append(made)
        return made

    def current_stream(self) -> CurrentStream:
        return CallersThread()

    @property
    def moved_by_callers(self) -> int:
        """How many messages went through the callers' own streams."""
        return self.driver_for_c.copied_by_callers

    def record_event(self) -> Event:
        return COMPLETED

    def synchronize(self, seconds: float) -> bool:
        # Twice, for they give each other work.
        return all(work.synchronize(seconds) for work in self._queues * 2)

    def register(self, address: int, nbytes: int) -> int:
        return address

    def unregister(self, address: int) -> None:
        # The first thing that a closing link does after its streams have come to rest.
        while self._queues:
            self._queues.pop().stop()

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
