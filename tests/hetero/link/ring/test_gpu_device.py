"""What an ordered link needs of a GPU in every thread that uses it. PyTorch's GPU is a stand-in."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from hetero.device.gpu import GpuDevice


class FakeStream:
    """A stream that notes which threads have called the GPU's runtime through it."""

    cuda_stream = 0
    device_index = 0

    def __init__(self) -> None:
        self.asked_by: list[threading.Thread] = []

    def query(self) -> bool:
        self.asked_by.append(threading.current_thread())
        return True


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    made = FakeStream()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def test_a_thread_that_has_not_used_the_gpu_gets_a_context_before_the_driver_is_called(
    stream: FakeStream,
) -> None:
    driver: Any = MagicMock()
    device = GpuDevice(torch.device("cuda:0"), driver)
    threads = [threading.Thread(target=device.current_stream) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert stream.asked_by == threads
    for _ in range(2):
        device.current_stream()
    assert stream.asked_by == [*threads, threading.current_thread()]


def test_a_stream_that_a_cuda_graph_captures_is_refused(
    stream: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = GpuDevice(torch.device("cuda:0"), MagicMock())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA graph cannot hold"):
        device.current_stream()
    assert stream.asked_by == []
