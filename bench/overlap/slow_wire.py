"""A slow wire, for measurements: what leaves over a link waits as long as its bytes would take.

It stands in front of the copies that the sending end's own stream makes into the ring, part by
part. So parts queue up behind each other, each direction has a wire of its own, a receiver that
does not take them holds the wire up, and the stream that computes goes on beside it. Messages small
enough for the caller's own stream are not slowed.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from ctypes import CFUNCTYPE, POINTER, byref, c_int, c_size_t, c_uint64, c_void_p, cast
from typing import Any

import torch

from hetero.errors import LinkError
from hetero.link.flow import Flow
from hetero.native.binding import CopyStep, RingWord, Vendor, native

_COPY = CFUNCTYPE(c_int, c_uint64, c_uint64, c_size_t, c_void_p)
"""A copy of CUDA's driver: target, source, bytes, stream."""
_STEP = CFUNCTYPE(c_int, c_void_p, POINTER(CopyStep))
"""A step of a stream of the host."""


class Wire(ABC):
    """One direction of one link. `bytes_per_s` may change while nothing is under way."""

    bytes_per_s: float | None = None

    def __init__(self, flow: Flow, slowed: Any) -> None:
        """`slowed`, a callback of C, stands in front of the function that copies."""
        driver = flow._state.streams.driver
        self._stream = flow._state.streams.copies
        self._plain = cast(driver.copy, type(slowed))
        self._slowed = slowed
        driver.copy = cast(slowed, c_void_p).value

    def _copy(self, nbytes: int, stream: int | None, *copy: Any) -> int:
        if self.bytes_per_s is None or stream != self._stream:
            return int(self._plain(*copy))
        return self._copy_late(nbytes, self.bytes_per_s, copy)

    @abstractmethod
    def _copy_late(self, nbytes: int, bytes_per_s: float, copy: tuple[Any, ...]) -> int:
        """Put a wait and the copy into the stream; what the driver returned."""

    @abstractmethod
    def seconds(self) -> dict[float, tuple[int, float]]:
        """By the speed that was asked for: bytes, and how long the wire was busy with them."""


class HostWire(Wire):
    """In front of a stream of the host: it waits for a word that a thread writes in time."""

    def __init__(self, flow: Flow) -> None:
        super().__init__(flow, _STEP(self._enqueue))
        self._word = RingWord()
        self._given = 0
        self._free_at = 0.0
        self._carried: dict[float, tuple[int, float]] = {}
        self._due: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        threading.Thread(target=self._release, name="slow wire", daemon=True).start()

    def _enqueue(self, stream: int, step: Any) -> int:
        return self._copy(step.contents.nbytes, stream, stream, step)

    def _copy_late(self, nbytes: int, bytes_per_s: float, copy: tuple[Any, ...]) -> int:
        # The bytes of a CPU's tensor are there when they are given to the link.
        start = max(time.monotonic(), self._free_at)
        self._free_at = start + nbytes / bytes_per_s
        self._given += 1
        self._due.put((self._free_at, self._given))
        carried, busy = self._carried.get(bytes_per_s, (0, 0.0))
        self._carried[bytes_per_s] = carried + nbytes, busy + self._free_at - start
        step = CopyStep(wait=(ctypes.addressof(self._word), self._given))
        native().host_enqueue(self._stream, byref(step))
        return int(self._plain(*copy))

    def _release(self) -> None:
        while True:
            due, value = self._due.get()
            time.sleep(max(0.0, due - time.monotonic()))
            native().host_write_word(byref(self._word), value)

    def seconds(self) -> dict[float, tuple[int, float]]:
        return self._carried


class GpuWire(Wire):
    """In front of a GPU's stream: the driver's own thread sleeps for it.

    A kernel that spins would measure time in the GPU's clock, which changes with its load. What
    the wait and the copy need beyond the time asked for is measured and taken off the next waits.
    """

    def __init__(self, flow: Flow) -> None:
        if flow._state.streams.driver.vendor != Vendor.CUDA:
            raise LinkError(
                "a link of GPUs is slowed where CUDA's streams copy: measure over ipc on NVIDIA, "
                "or on a CPU"
            )
        super().__init__(flow, _COPY(self._enqueue))
        self._sleep = cast(ctypes.CDLL(None).usleep, c_void_p)
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
        self._launch.argtypes = [c_void_p, c_void_p, c_void_p]
        self._more = float("inf")
        self._under_way: deque[tuple[Any, Any, int, float, float]] = deque()
        self._carried: dict[float, tuple[int, float]] = {}

    def _enqueue(self, target: int, source: int, nbytes: int, stream: int | None) -> int:
        return self._copy(nbytes, stream, target, source, nbytes, stream)

    def _copy_late(self, nbytes: int, bytes_per_s: float, copy: tuple[Any, ...]) -> int:
        self._read(wait=False)
        more = 0.0 if self._more == float("inf") else self._more
        asked = max(0.0, nbytes / bytes_per_s - more)
        stream = torch.cuda.ExternalStream(self._stream)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        failed = self._launch(self._stream, self._sleep, int(asked * 1e6))
        failed = failed or self._plain(*copy)
        end.record(stream)
        self._under_way.append((begin, end, nbytes, bytes_per_s, asked))
        return int(failed)

    def _read(self, *, wait: bool) -> None:
        while self._under_way and (wait or self._under_way[0][1].query()):
            begin, end, nbytes, bytes_per_s, asked = self._under_way.popleft()
            end.synchronize()
            took = begin.elapsed_time(end) / 1000
            self._more = min(self._more, max(0.0, took - asked))
            carried, busy = self._carried.get(bytes_per_s, (0, 0.0))
            self._carried[bytes_per_s] = carried + nbytes, busy + took

    def seconds(self) -> dict[float, tuple[int, float]]:
        self._read(wait=True)
        return self._carried


def slow_down(flow: Flow) -> Wire:
    """Put a wire in front of a link's outgoing direction; as fast as the link until told."""
    return HostWire(flow) if flow.device.has_host_tensors else GpuWire(flow)
