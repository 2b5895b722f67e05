"""The CPU as a device: copies are done when they return, and memory needs no registration."""

from __future__ import annotations

import torch

from hetero.device.base import DeviceRuntime, Mark, Reached

_DONE = Reached()


class CpuRuntime(DeviceRuntime):
    """Plain memory copies in the calling thread; torch releases the GIL for them."""

    def mark(self) -> Mark:
        return _DONE

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Mark | None) -> Mark:
        target.copy_(source)
        return _DONE

    def register(self, host: torch.Tensor) -> None:
        return

    def unregister(self, host: torch.Tensor) -> None:
        return
