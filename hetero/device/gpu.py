"""A CUDA or ROCm device through PyTorch, whose `torch.cuda` serves both."""

from __future__ import annotations

import torch

from hetero.device.base import DeviceRuntime, Mark
from hetero.errors import LinkError

# cudaHostRegisterPortable: pinned for every device of the process.
_PORTABLE = 1


class _EventMark(Mark):
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

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def mark(self) -> Mark:
        return self._record(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Mark | None) -> Mark:
        with torch.cuda.stream(self._stream):
            if isinstance(after, _EventMark):
                self._stream.wait_event(after.event)
            target.copy_(source, non_blocking=True)
        return self._record(self._stream)

    def register(self, host: torch.Tensor) -> None:
        code = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), _PORTABLE)
        if int(code) != 0:
            raise LinkError(
                f"the GPU runtime refused to pin {host.numel()} bytes of host memory (code "
                f"{int(code)}); raise the locked-memory limit (ulimit -l) or make the ring smaller"
            )

    def unregister(self, host: torch.Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())

    def _record(self, stream: torch.cuda.Stream) -> Mark:
        event = torch.cuda.Event()
        event.record(stream)
        return _EventMark(event, self._device)
