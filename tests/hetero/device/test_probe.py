"""What the probe of stream waits says of GPUs that behave and that do not; all are played."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.device import probe
from hetero.device.probe import probe_stream_values
from hetero.errors import LinkError

SECONDS = 0.4


class PlayedGpu:
    """A driver, and a stream whose steps a thread does in order as soon as they are ready."""

    cuda_stream = 0

    def __init__(self) -> None:
        self.waits = self.wakes = self.has_stream_values = True
        self.registered: list[int] = []
        self._steps: deque[Callable[[], bool]] = deque()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.0005):
            self.query()

    def query(self) -> bool:
        """Do what is ready, also while the thread has no turn; whether nothing is left."""
        with self._lock:
            while self._steps and self._steps[0]():
                self._steps.popleft()
            return not self._steps

    def end(self) -> None:
        self._ended.set()
        self._thread.join(120)

    def on_device(self, device: int) -> AbstractContextManager[None]:
        return nullcontext()

    def offers_stream_values(self, device: int) -> bool:
        return self.has_stream_values

    def device_address(self, host_address: int) -> int:
        return host_address

    def register_host(self, address: int, nbytes: int) -> None:
        self.registered.append(address)

    def unregister_host(self, address: int) -> None:
        self.registered.remove(address)

    def stream_wait_value(self, stream: int, address: int, value: int) -> None:
        word = ctypes.c_uint32.from_address(address)
        self._steps.append(lambda: not self.waits or (self.wakes and word.value >= value))

    def stream_write_value(self, stream: int, address: int, value: int) -> None:
        def write() -> bool:
            ctypes.c_uint32.from_address(address).value = value
            return True

        self._steps.append(write)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = PlayedGpu()
    cuda = SimpleNamespace(Stream=lambda device: made, synchronize=lambda device: None)
    monkeypatch.setattr(probe, "torch", SimpleNamespace(cuda=cuda))
    yield made
    made.end()


def test_a_gpu_that_waits_and_wakes_is_trusted_from_then_on(gpu: Any) -> None:
    assert probe_stream_values(gpu, 0, seconds=SECONDS * 10) is None
    assert gpu.registered == []
    gpu.waits = False
    assert probe_stream_values(gpu, 0, seconds=SECONDS * 10) is None


def test_a_stream_that_does_not_wait_is_noticed(gpu: Any) -> None:
    gpu.waits = False
    reason = probe_stream_values(gpu, 0, seconds=SECONDS * 10)
    assert reason == "the stream went on before the word was written"


def test_a_stream_that_never_goes_on_is_noticed_and_its_memory_stays(gpu: Any) -> None:
    gpu.wakes = False
    reason = probe_stream_values(gpu, 0, seconds=SECONDS)
    assert reason == "the stream did not go on when the word was written"
    # A GPU that may yet write there keeps its page, mapped and registered.
    (address,) = gpu.registered
    assert ctypes.c_uint32.from_address(address).value == 2


def test_a_device_without_the_calls_is_not_tried(gpu: Any) -> None:
    gpu.has_stream_values = False
    assert probe_stream_values(gpu, 0) == "the device has no stream wait and write"
    assert gpu.registered == []


def test_a_call_that_fails_is_the_reason(gpu: Any) -> None:
    def refuse(*_: object) -> None:
        raise LinkError("hipStreamWaitValue32 failed")

    gpu.stream_wait_value = refuse
    assert probe_stream_values(gpu, 0, seconds=SECONDS) == "hipStreamWaitValue32 failed"
    assert gpu.registered == []
