"""Asynchronous copies from a rank's device to host memory, on a side stream."""

from __future__ import annotations

from contextlib import suppress

import torch

from hetero.device.driver import GpuDriver, driver_for
from hetero.errors import LinkError


class DeviceToHostCopier:
    """Copies on a high-priority side stream, ordered by events; on a CPU, synchronous copies.

    The caller must keep both tensors alive until the copy's event has completed or its own stream
    waits for it, so `record_stream` is not needed. None stands for a completed event.
    """

    def __init__(self, device: torch.device, *, driver: GpuDriver | None = None) -> None:
        self._device = device
        self._driver: GpuDriver | None = None
        if device.type != "cpu":
            self._driver = driver or driver_for(device)
            self._index = torch.cuda.current_device() if device.index is None else device.index
            self._stream = torch.cuda.Stream(device, priority=-1)

    def record_event(self) -> torch.cuda.Event | None:
        """Record an event on the caller's current stream."""
        if self._driver is None:
            return None
        return torch.cuda.current_stream(self._device).record_event()

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, *, after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Copy byte tensors of equal size once `after` has completed; returns the copy's event."""
        if self._driver is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait_on_current_stream(self, event: torch.cuda.Event | None) -> None:
        """Make the caller's current stream wait for an event."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def register(self, host: torch.Tensor) -> None:
        """Pin host memory, so that the device copies to it at full speed."""
        if self._driver is not None:
            with self._driver.on_device(self._index):
                self._driver.register_host(host.data_ptr(), host.numel())

    def unregister(self, host: torch.Tensor) -> None:
        """Undo `register`. The memory must not be in use by a copy."""
        if self._driver is not None:
            # After a GPU error every call fails, and the error has been reported already.
            with suppress(LinkError), self._driver.on_device(self._index):
                self._driver.unregister_host(host.data_ptr())
