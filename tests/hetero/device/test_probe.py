"""What the probe of stream waits says of GPUs that behave and that do not; all are played."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from hetero.device import probe
from hetero.device.hip_driver import HipDriver
from hetero.device.probe import probe_stream_values
from hetero.errors import LinkError
from tests.hetero.device.fake_library import FakeLibrary

SECONDS = 0.4
Step = Callable[[], bool]


class PlayedGpu:
    """Streams as queues that a thread works off; a step that is not ready holds its queue."""

    def __init__(self, *, queues: int, waits: bool = True, wakes: bool = True) -> None:
        self.waits, self.wakes = waits, wakes
        self.registered: list[int] = []
        self._queues: list[deque[Step]] = [deque() for _ in range(queues)]
        self._numbers = itertools.count()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stream(self, _device: int) -> SimpleNamespace:
        number = next(self._numbers)
        queue = self._queues[number % len(self._queues)]
        return SimpleNamespace(cuda_stream=number, query=lambda: not queue)

    def enqueue(self, stream: int, step: Step) -> None:
        self._queues[stream % len(self._queues)].append(step)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(120)

    def _run(self) -> None:
        while not self._ended.is_set():
            for queue in self._queues:
                while queue and queue[0]():
                    queue.popleft()
            time.sleep(0.0005)


class PlayedDriver(HipDriver):
    """AMD's driver over a library that does nothing, with the work of streams played."""

    def __init__(self, library: str, gpu: PlayedGpu) -> None:
        super().__init__(library)
        self.gpu = gpu
        self.has_stream_values = True

    def offers_stream_values(self, device: int) -> bool:
        return self.has_stream_values

    def device_address(self, host_address: int) -> int:
        return host_address

    def register_host(self, address: int, nbytes: int) -> None:
        self.gpu.registered.append(address)

    def unregister_host(self, address: int) -> None:
        self.gpu.registered.remove(address)

    def stream_wait_value(self, stream: int, address: int, value: int) -> None:
        word = ctypes.c_uint32.from_address(address)
        gpu = self.gpu
        self.gpu.enqueue(stream, lambda: not gpu.waits or (gpu.wakes and word.value >= value))

    def stream_write_value(self, stream: int, address: int, value: int) -> None:
        def write() -> bool:
            ctypes.c_uint32.from_address(address).value = value
            return True

        self.gpu.enqueue(stream, write)


@pytest.fixture
def play(fake_hip: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Makes a driver over a played GPU, which stands in for PyTorch's too."""
    gpus: list[PlayedGpu] = []

    def make(**behaviour: object) -> PlayedDriver:
        gpu = PlayedGpu(**behaviour)
        gpus.append(gpu)
        cuda = SimpleNamespace(Stream=gpu.stream, synchronize=lambda _: None)
        monkeypatch.setattr(probe, "torch", SimpleNamespace(cuda=cuda))
        return PlayedDriver(fake_hip.path, gpu)

    yield make
    for gpu in gpus:
        gpu.close()


@pytest.mark.parametrize("queues", [1, 16])
def test_a_gpu_that_waits_and_wakes_is_trusted_from_then_on(play, queues: int) -> None:
    driver = play(queues=queues)
    assert probe_stream_values(driver, 0, seconds=SECONDS * 10) is None
    assert driver.gpu.registered == []
    driver.gpu.waits = False
    assert probe_stream_values(driver, 0, seconds=SECONDS * 10) is None


def test_a_stream_that_does_not_wait_is_noticed(play) -> None:
    driver = play(queues=16, waits=False)
    reason = probe_stream_values(driver, 0, seconds=SECONDS * 10)
    assert reason == "the stream went on before the word was written"


def test_a_stream_that_never_goes_on_is_noticed_and_its_memory_stays(play) -> None:
    driver = play(queues=16, wakes=False)
    reason = probe_stream_values(driver, 0, seconds=SECONDS)
    assert reason == "the stream did not go on when the word was written"
    # A GPU that may yet write there keeps its page, mapped and registered.
    (address,) = driver.gpu.registered
    assert ctypes.c_uint32.from_address(address).value == 2


def test_a_device_without_the_calls_is_not_tried(play) -> None:
    driver = play(queues=16)
    driver.has_stream_values = False
    assert probe_stream_values(driver, 0) == "the device has no stream wait and write"
    assert driver.gpu.registered == []


def test_a_call_that_fails_is_the_reason(play, monkeypatch) -> None:
    driver = play(queues=16)

    def refuse(*_: object) -> None:
        raise LinkError("hipStreamWaitValue32 failed")

    monkeypatch.setattr(driver, "stream_wait_value", refuse)
    assert probe_stream_values(driver, 0, seconds=SECONDS) == "hipStreamWaitValue32 failed"
    assert driver.gpu.registered == []
