"""What a transport needs of a device, whatever the device is."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Mark(ABC):
    """A point in the work of a device: everything enqueued before it is done once it is reached."""

    @abstractmethod
    def reached(self) -> bool:
        """Never blocks."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until it is reached, without holding the GIL."""

    @abstractmethod
    def order_current_stream(self) -> None:
        """Let the caller's current stream go on only after it; the calling thread goes on now."""


class Reached(Mark):
    """A point that has been passed already."""

    def reached(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def order_current_stream(self) -> None:
        return


class DeviceRuntime(ABC):
    """Copies between a device's tensors and host memory, off the training stream."""

    @abstractmethod
    def mark(self) -> Mark:
        """The end of what the caller has enqueued on its current stream so far."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Mark | None) -> Mark:
        """Copy equally sized byte tensors, once `after` is reached; returns the copy's mark."""

    @abstractmethod
    def register(self, host: torch.Tensor) -> None:
        """Pin host memory, so that the device copies to and from it at full speed."""

    @abstractmethod
    def unregister(self, host: torch.Tensor) -> None:
        """Undo `register`. The memory must not be in use by a copy."""
