"""Probes whether a GPU's streams can wait on words of host memory."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable
from functools import cache

import torch

from hetero.device.driver_base import GpuDriver
from hetero.errors import LinkError

_WORD = 4
_GATE, _AFTER = 0, 1
_PATTERN = 0x5EED
_OPEN = 2
_PAUSE_SECONDS = 0.005


@cache
def probe_stream_values(driver: GpuDriver, device: int, *, seconds: float = 5.0) -> str | None:
    """Try `stream_wait_value` on registered host memory; None if it works, else why it does not.

    It works if the stream waits until the host has written the word, and then goes on. Other
    streams may be blocked meanwhile where they share a hardware queue: links never enqueue a wait
    before the work that satisfies it. Takes milliseconds, or up to twice `seconds` if it fails;
    memory that a stuck stream may still access is then never freed. A device is probed once.
    """
    try:
        with driver.on_device(device):
            if not driver.offers_stream_values(device):
                return "the device has no stream wait and write"
            return _Probe(driver, device, seconds).run()
    except LinkError as error:
        return str(error)


class _Probe:
    def __init__(self, driver: GpuDriver, device: int, seconds: float) -> None:
        self._driver = driver
        self._seconds = seconds
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._words = (ctypes.c_uint32 * (mmap.PAGESIZE // _WORD)).from_buffer(self._memory)
        self._host = ctypes.addressof(self._words)
        self._stream = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)

    def run(self) -> str | None:
        self._driver.register_host(self._host, mmap.PAGESIZE)
        try:
            reason = self._try()
        finally:
            self._words[_GATE] = _OPEN
            ended = self._until(lambda: bool(self._stream.query()))
            if ended:
                self._driver.unregister_host(self._host)
            else:
                # The GPU may still access this page: never free it.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._words))
        return reason if reason or ended else "the stream did not go on when the word was written"

    def _try(self) -> str | None:
        words, driver = self._words, self._driver
        address = driver.device_address(self._host)
        stream = self._stream.cuda_stream
        driver.stream_wait_value(stream, address + _GATE * _WORD, _OPEN)
        driver.stream_write_value(stream, address + _AFTER * _WORD, _PATTERN)
        words[_GATE] = _OPEN - 1
        time.sleep(_PAUSE_SECONDS)
        if words[_AFTER] != 0 or self._stream.query():
            return "the stream went on before the word was written"
        words[_GATE] = _OPEN
        if not self._until(lambda: bool(words[_AFTER] == _PATTERN)):
            return "the stream did not go on when the word was written"
        return None

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Poll a condition until it is true, or time is up."""
        deadline = time.monotonic() + self._seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_SECONDS / 10)
        return True
