"""Streams of a CPU that plays a GPU, given work by C alone. *Emulated*."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
import time
from ctypes import c_bool, c_void_p
from pathlib import Path

from hetero.device.base import Mark
from hetero.device.ordered import CurrentStream, NativeStreams
from hetero.errors import LinkError
from hetero.native.library import LIBRARY, EntryPoints, Step, Streams, Vendor, native
from tests.emulated_streams import CallersThread, EmulatedOrderedDevice
from tests.hip_on_cuda.library import COMPILER, compile_library

_SOURCE = Path(__file__).with_name("stream_driver.c")
_ANY_VALUE = 2**32
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
        self._copies = copies
        self._driver = _built()
        self._made: list[_Streams] = []

    def native_streams(self) -> NativeStreams | None:
        library = native()
        assert library is not None, lacking()
        streams = _Streams(library, self._driver, copies=self._copies)
        self._made.append(streams)
        return streams

    def current_stream(self) -> CurrentStream:
        return _NoStream(lambda: None)

    def rests_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not all(streams.are_idle() for streams in self._made):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def unregister(self, address: int) -> None:
        # The first thing that a closing link does after its streams have come to rest.
        while self._made:
            self._made.pop().free()


class _NoStream(CallersThread):
    """No stream of the driver, so no message goes there."""

    def is_at_home(self) -> bool:
        return False


class _Streams(NativeStreams):
    def __init__(self, library: ctypes.CDLL, driver: ctypes.CDLL, *, copies: bool) -> None:
        self.library = library
        self._driver = driver
        self._handles = [driver.stream_new(copies) for _ in range(3)]
        self._event = driver.event_new()
        copying, waits, writes = self._handles
        addresses = {
            step.name.lower(): _address(getattr(driver, f"driver_{step.name.lower()}"))
            for step in Step
            if step is not Step.PAST_COUNTER
        }
        self.streams = Streams(
            driver=EntryPoints(vendor=Vendor.CUDA, end_of_counter=_ANY_VALUE, **addresses),
            copies=copying,
            waits=waits,
            writes=writes,
            join=self._event,
        )

    def event_of(self, mark: Mark) -> int:
        return 0

    def failure(self, failed: int, purpose: str) -> LinkError:
        return LinkError(f"a stream's queue of work was full, to {purpose}")

    def are_idle(self) -> bool:
        return all(self._driver.stream_is_idle(handle) for handle in self._handles)

    def free(self) -> None:
        for handle in self._handles:
            self._driver.stream_free(handle)
        self._driver.event_free(self._event)


def _address(function: object) -> int:
    return ctypes.cast(function, c_void_p).value or 0  # type: ignore[arg-type]


@functools.cache
def _built() -> ctypes.CDLL:
    """The driver, built once for each version of its source and kept with temporary files."""
    version = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"libstream_driver-{os.getuid()}-{version}.so"
    driver = ctypes.CDLL(str(target if target.exists() else compile_library(_SOURCE, target)))
    for name, result, arguments in (
        ("stream_new", c_void_p, [c_bool]),
        ("stream_is_idle", c_bool, [c_void_p]),
        ("stream_free", None, [c_void_p]),
        ("event_new", c_void_p, []),
        ("event_free", None, [c_void_p]),
    ):
        function = getattr(driver, name)
        function.restype, function.argtypes = result, arguments
    return driver
