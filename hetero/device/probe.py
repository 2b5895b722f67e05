"""Whether a GPU's streams can be held and released through host memory, by trying it."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hetero.device.driver_base import GpuDriver
from hetero.errors import LinkError

_WORD = 4
_GATE, _BEHIND, _SOURCE, _TARGETS = 0, 1, 2, 16
_OTHER_STREAMS = 8
_PATTERN = 0x5EED
_OPEN = 2
_PAUSE_SECONDS = 0.005


def probe_stream_values(driver: GpuDriver, device: int, *, seconds: float = 5.0) -> str | None:
    """Try `stream_wait_value` on registered host memory; None if it works, else why it does not.

    It works when the stream waits, when copies on other streams meanwhile come to their end, and
    when the stream goes on once the host has written the word. A device that passes is trusted by
    `driver.can_wait_on_stream` from then on. Takes milliseconds, or up to twice `seconds` when it
    fails; memory that a stuck stream may still touch is then never given back.
    """
    try:
        with driver.on_device(device):
            if not driver.offers_stream_values(device):
                return "the device has no stream wait and write"
            reason = _Probe(driver, device, seconds).run()
    except LinkError as error:
        return str(error)
    if reason is None:
        driver.trust_stream_values(device)
    return reason


@dataclass(frozen=True)
class _Lane:
    """A stream, with a word of host memory that its work ends by writing."""

    stream: torch.cuda.Stream
    target: int


class _Probe:
    def __init__(self, driver: GpuDriver, device: int, seconds: float) -> None:
        self._driver = driver
        self._seconds = seconds
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._words = (ctypes.c_uint32 * (mmap.PAGESIZE // _WORD)).from_buffer(self._memory)
        self._host = ctypes.addressof(self._words)
        self._scratch = torch.zeros(_OTHER_STREAMS, dtype=torch.int32, device=f"cuda:{device}")
        self._held = _Lane(torch.cuda.Stream(device), _BEHIND)
        self._others = [
            _Lane(torch.cuda.Stream(device), _TARGETS + number) for number in range(_OTHER_STREAMS)
        ]
        torch.cuda.synchronize(device)

    def run(self) -> str | None:
        self._driver.register_host(self._host, mmap.PAGESIZE)
        try:
            reason = self._try()
        finally:
            self._words[_GATE] = _OPEN
            ended = self._until(lambda: all(lane.stream.query() for lane in self._lanes()))
            if ended:
                self._driver.unregister_host(self._host)
            else:
                # The GPU may yet read the word and write behind it: this page must stay.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._words))
        return reason if reason or ended else "the stream did not go on when the word was written"

    def _try(self) -> str | None:
        words, driver = self._words, self._driver
        address = driver.device_address(self._host)
        words[_SOURCE] = _PATTERN
        stream = self._held.stream.cuda_stream
        driver.stream_wait_value(stream, address + _GATE * _WORD, _OPEN)
        driver.stream_write_value(stream, address + _BEHIND * _WORD, _PATTERN)
        for number, lane in enumerate(self._others):
            through = self._scratch.data_ptr() + number * _WORD
            driver.copy(through, self._host + _SOURCE * _WORD, _WORD, lane.stream.cuda_stream)
            driver.copy(self._host + lane.target * _WORD, through, _WORD, lane.stream.cuda_stream)
        if not self._until(lambda: all(words[lane.target] == _PATTERN for lane in self._others)):
            return (
                "copies on other streams stand still while one stream waits; let streams have "
                "queues of their own (CUDA_DEVICE_MAX_CONNECTIONS, GPU_MAX_HW_QUEUES)"
            )
        words[_GATE] = _OPEN - 1
        time.sleep(_PAUSE_SECONDS)
        if words[_BEHIND] != 0 or self._held.stream.query():
            return "the stream went on before the word was written"
        words[_GATE] = _OPEN
        if not self._until(lambda: bool(words[_BEHIND] == _PATTERN)):
            return "the stream did not go on when the word was written"
        return None

    def _lanes(self) -> list[_Lane]:
        return [self._held, *self._others]

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Poll a condition that only the GPU makes true, until the time allowed is over."""
        deadline = time.monotonic() + self._seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_SECONDS / 10)
        return True
