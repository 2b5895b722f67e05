"""A CUDA or ROCm device: streams, events and copies through PyTorch, the rest by its driver."""

from __future__ import annotations

from contextlib import suppress

import torch

from hetero.device.base import DeviceRuntime, Mark
from hetero.device.driver import GpuDriver, driver_for
from hetero.errors import LinkError


class EventMark(Mark):
    """A recorded event of a stream of the device."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event = event
        self._device = device

    def reached(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def order_current_stream(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)


class GpuRuntime(DeviceRuntime):
    """Copies on one side stream of high priority, ordered by events.

    The caller keeps both tensors until the copy's mark is reached or its own stream is ordered
    after it, so the allocator need not be told of the side stream.
    """

    def __init__(self, device: torch.device, *, driver: GpuDriver | None = None) -> None:
        self._device = device
        self._driver = driver or driver_for(device)
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._stream = torch.cuda.Stream(device, priority=-1)

    def mark(self) -> Mark:
        return self._record(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Mark | None) -> Mark:
        with torch.cuda.stream(self._stream):
            if isinstance(after, EventMark):
                self._stream.wait_event(after.event)
            target.copy_(source, non_blocking=True)
        return self._record(self._stream)

    def register(self, host: torch.Tensor) -> None:
        with self._driver.on_device(self._index):
            self._driver.register_host(host.data_ptr(), host.numel())

    def unregister(self, host: torch.Tensor) -> None:
        # After an error of the GPU every call fails; the link that closes has told of it.
        with suppress(LinkError), self._driver.on_device(self._index):
            self._driver.unregister_host(host.data_ptr())

    def _record(self, stream: torch.cuda.Stream) -> Mark:
        event = torch.cuda.Event()
        event.record(stream)
        return EventMark(event, self._device)
