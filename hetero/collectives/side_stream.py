"""The stream that a group's calls run on when they do not run on their caller's.

A call that its caller waits for at once runs on the caller's stream. Any other runs on the group's
side stream, which waits for what the caller had enqueued before; `wait()` on the call's handle has
the caller's stream wait for it. On a CPU there are no streams, and all of this is a no-op.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from hetero.device.gpu import require_no_capture


@cache
def _stream_of(handle: int, index: int) -> torch.cuda.Stream:
    return torch.cuda.current_stream(index)


def current_stream(index: int) -> torch.cuda.Stream:
    """`torch.cuda.current_stream` without the microseconds that making a new object takes."""
    return _stream_of(torch._C._cuda_getCurrentRawStream(index), index)


class _StreamContext:
    """`torch.cuda.stream` without its repeated queries of the current device and stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._index = stream, stream.device_index

    def __enter__(self) -> None:
        self._device = torch._C._cuda_getDevice()
        self._previous = current_stream(self._index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self._previous)
        if self._device != self._index:
            torch.cuda.set_device(self._device)


class SideStream:
    """A stream of a group's own. One call uses it at a time."""

    def __init__(self, device: torch.device) -> None:
        self._in_flight: deque[tuple[torch.cuda.Event, object]] = deque()
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self._index = self.stream.device_index
            self._context = _StreamContext(self.stream)

    @property
    def exists(self) -> bool:
        return self.stream is not None

    def require_no_capture(self) -> None:
        """Refuse a call inside a CUDA graph's capture before any of it has started."""
        if self.stream is not None:
            require_no_capture()

    def record_event(self) -> torch.cuda.Event | None:
        """An event after what the current stream holds; None on a CPU."""
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        event.record(current_stream(self._index))
        return event

    def record_end(self, held: object) -> torch.cuda.Event | None:
        """`record_event`, and keep `held`, which has tensors, alive until the GPU gets there."""
        end = self.record_event()
        if end is not None:
            while self._in_flight and self._in_flight[0][0].query():
                self._in_flight.popleft()
            self._in_flight.append((end, held))
        return end

    def synchronize(self) -> None:
        """Block until the GPU has done all that this stream and the current one hold."""
        if self.stream is not None:
            self.stream.synchronize()
            current_stream(self._index).synchronize()

    def wait_event(self, event: torch.cuda.Event | None) -> None:
        """Have this stream wait for an event."""
        if self.stream is not None and event is not None:
            event.wait(self.stream)

    def as_current(self) -> AbstractContextManager[None]:
        """A context in which this is the current stream."""
        return nullcontext() if self.stream is None else self._context
