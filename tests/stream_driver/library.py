"""Streams of a CPU that plays a GPU, given work by C alone. *Emulated*."""

from __future__ import annotations

import ctypes
import functools
import time
from ctypes import c_bool, c_int, c_void_p
from pathlib import Path

from hetero.device.base import Mark
from hetero.device.ordered import CurrentStream, NativeStreams
from hetero.errors import LinkError
from hetero.native.library import LIBRARY, EntryPoints, Step, Streams, Vendor, native
from tests.emulated_streams import ANY_VALUE, CallersThread, EmulatedOrderedDevice
from tests.hip_on_cuda.library import COMPILER, compiled

_SOURCE = Path(__file__).with_name("stream_driver.c")
_POLL_SECONDS = 1e-3


def lacking() -> str | None:
    """Why this machine cannot build it."""
    if COMPILER is None:
        return "needs a C compiler (cc) to build the driver that plays a GPU's"
    return LIBRARY.why_not()


class DeviceInC(EmulatedOrderedDevice):
    """A CPU that plays a GPU for links that are enqueued by C."""

    def __init__(self, *, copies: bool = True) -> None:
        super().__init__()
        self._driver = _built()
        self._device = self._driver.device_new(copies)
        self._made: list[_Streams] = []

    def native_streams(self) -> NativeStreams | None:
        library = native()
        assert library is not None, lacking()
        first = 3 * len(self._made)
        handles = [self._driver.device_stream(self._device, first + n) for n in range(3)]
        self._made.append(_Streams(library, self._driver, handles))
        return self._made[-1]

    def current_stream(self) -> CurrentStream:
        return _NoStream(lambda: None)

    def rests_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._driver.device_is_idle(self._device):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def unregister(self, address: int) -> None:
        # The first thing that a closing link does after its streams have come to rest.
        if self._made:
            self._driver.device_free(self._device)
        while self._made:
            self._made.pop().free()


class _NoStream(CallersThread):
    """No stream of the driver, so no message goes there."""

    def is_at_home(self) -> bool:
        return False


class _Streams(NativeStreams):
    def __init__(self, library: ctypes.CDLL, driver: ctypes.CDLL, handles: list[int]) -> None:
        self.library = library
        self._driver = driver
        self._event = driver.event_new()
        copies, waits, writes = handles
        functions = {
            step: getattr(driver, f"driver_{step.name.lower()}")
            for step in Step
            if step is not Step.PAST_COUNTER
        }
        self.streams = Streams(
            driver=EntryPoints.of(functions, vendor=Vendor.CUDA, end_of_counter=ANY_VALUE),
            copies=copies,
            waits=waits,
            writes=writes,
            join=self._event,
            callers_wait=True,
        )

    def event_of(self, mark: Mark) -> int:
        return 0

    def failure(self, failed: int, purpose: str) -> LinkError:
        return LinkError(f"a stream's queue of work was full, to {purpose}")

    def free(self) -> None:
        self._driver.event_free(self._event)


@functools.cache
def _built() -> ctypes.CDLL:
    driver = ctypes.CDLL(str(compiled(_SOURCE)))
    for name, result, arguments in (
        ("device_new", c_void_p, [c_bool]),
        ("device_stream", c_void_p, [c_void_p, c_int]),
        ("device_is_idle", c_bool, [c_void_p]),
        ("device_free", None, [c_void_p]),
        ("event_new", c_void_p, []),
        ("event_free", None, [c_void_p]),
    ):
        function = getattr(driver, name)
        function.restype, function.argtypes = result, arguments
    return driver
